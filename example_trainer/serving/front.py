"""The outermost ASGI layer: `/generate` is answered here, and vLLM's generating routes pass the same door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from example_trainer.serving.door import Door
from example_trainer.serving.generate import GenerateHandler, Receive, Scope, Send
from example_trainer.serving.guard import Sites, refuse_without_key
from example_trainer.serving.problems import Problem

_GENERATING = ("/v1/", "/v2/", "/inference/", "/invocations", "/generative_scoring", "/cohere/")
_OPEN = frozenset({"/health", "/readyz", "/ping"})
_LEFT_OUT = {
    "/scale_elastic_ep": "this server has one engine",
    "/is_scaling_elastic_ep": "this server has one engine",
    "/inference/v1/abort_requests": "a client ends its own requests by closing their connections, and nobody else's",
    "/abort_requests": "a client ends its own requests by closing their connections, and nobody else's",
}
"""Routes of vLLM's that are not answered, each with the reason."""
_TAKEN_OVER = {f"/v1/{name}": f"/lora/{name}" for name in ("load_lora_adapter", "unload_lora_adapter")}

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """Wraps vLLM's application, which stays as it is.

    Where there are API keys everything but health needs one. vLLM's own routes for adapters are ours: its way of
    loading in place would read the adapter from its file in every step, and nobody would have to show a token.
    """

    def __init__(
        self,
        app: Application,
        generate: GenerateHandler,
        door: Door,
        *,
        root_path: str,
        keys: list[bytes],
        sites: Sites,
    ) -> None:
        self._app = app
        self._generate = generate
        self._door = door
        self._root_path = root_path.rstrip("/")
        self._keys = keys
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"} or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._root_path)
        try:
            if path not in _OPEN:
                refuse_without_key(scope["headers"], self._keys)
                self._sites.check(scope.get("method", "POST"), path, scope["headers"])
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
            await self._through_door(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _through_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._door.leave()


def with_cors(front: Application, args: Any) -> Application:
    """Let the pages that vLLM's `--allowed-origins` names read what is answered here too."""
    if not args.allowed_origins:
        return front
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        front,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )


def keys_of(args: Any, *, bridge_token: str) -> list[bytes]:
    """The keys that vLLM asks for under `/v1`, and the bridge token, which may do more; none where there are none."""
    from vllm import envs

    keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return [key.encode() for key in (*keys, bridge_token)] if keys else []
