"""The outermost ASGI layer of the inference server: keys, allowed hosts, and the way of each request.

It answers `/generate`, and admits requests of vLLM's generating routes through the same admission gate; vLLM's
application answers the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.common.head_requests import HeadAsGet
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.auth import AllowedHosts, Headers, refuse_without_key
from example_trainer.serving.generate import GenerateHandler
from example_trainer.serving.problems import Problem

_GENERATING = ("/v1/", "/v2/", "/inference/", "/invocations", "/generative_scoring", "/cohere/")
_OPEN = frozenset({"/health", "/readyz", "/ping"})

_LEFT_OUT = {
    "/scale_elastic_ep": "this server has one engine",
    "/is_scaling_elastic_ep": "this server has one engine",
    "/inference/v1/abort_requests": "a client can end only its own requests, by closing their connections",
    "/abort_requests": "a client can end only its own requests, by closing their connections",
}
"""Routes of vLLM's that are not served, each with the reason."""

_TAKEN_OVER = {f"/v1/{name}": f"/lora/{name}" for name in ("load_lora_adapter", "unload_lora_adapter")}


class ServerASGI:
    """Wraps vLLM's application, which stays as it is.

    If there are API keys, every route but health needs one. vLLM's own routes for adapters are replaced: its loading in
    place would read the adapter from its file in every step, and would need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        generate: GenerateHandler,
        gate: AdmissionGate,
        *,
        root_path: str,
        keys: list[bytes],
        allowed_hosts: AllowedHosts,
        check: Callable[[Headers], None] = lambda _: None,
    ) -> None:
        """Keep the arguments; `check` raises the refusal of a request for tokens with these headers."""
        self._check = check
        self._app: ASGIApp = HeadAsGet(app)
        self._generate = generate
        self._gate = gate
        self._root_path = root_path.rstrip("/")
        self._keys = keys
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"} or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._root_path)
        try:
            if path not in _OPEN:
                refuse_without_key(scope["headers"], self._keys)
                self._allowed_hosts.check(scope.get("method", "POST"), path, scope["headers"])
            if scope["type"] == "websocket":
                await self._app(scope, receive, send)
                return
            await self._answer(path, scope, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["method"] == "POST"
        if path in {"/generate", "/generate/"}:
            if not posted:
                raise Problem(405, "method-not-allowed", f"/generate takes POST, not {scope['method']}", allow="POST")
            await self._generate(scope, receive, send)
        elif path in _LEFT_OUT:
            raise Problem(404, "not-served", f"{path} is not answered: {_LEFT_OUT[path]}")
        elif path in _TAKEN_OVER:
            await self._app({**scope, "path": self._root_path + _TAKEN_OVER[path]}, receive, send)
        elif posted and path.startswith(_GENERATING):
            await self._answer_admitted(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate.enter(partial(self._check, scope["headers"]))
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()


def with_cors(asgi: ASGIApp, args: Any) -> ASGIApp:
    """Allow the pages in vLLM's `--allowed-origins` to read these answers too."""
    if not args.allowed_origins:
        return asgi
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        asgi,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )


def keys_of(args: Any, *, bridge_token: str) -> list[bytes]:
    """Return the keys that vLLM needs under `/v1`, and the bridge token, which may do more; none without keys."""
    from vllm import envs

    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return [key.encode() for key in (*keys, bridge_token)] if keys else []
