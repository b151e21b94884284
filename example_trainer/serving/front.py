"""The outermost ASGI layer: `/generate` is answered here, and vLLM's generating routes pass the same door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from example_trainer.serving.door import Door
from example_trainer.serving.generate import GenerateHandler, Receive, Scope, Send
from example_trainer.serving.guard import refuse_foreign_page, refuse_without_key
from example_trainer.serving.problems import Problem

_GENERATING = ("/v1/", "/v2/", "/inference/", "/invocations")
_NOT_GENERATING = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """Wraps vLLM's application, which stays as it is."""

    def __init__(
        self, app: Application, generate: GenerateHandler, door: Door, *, root_path: str, api_keys: list[str]
    ) -> None:
        self._app = app
        self._generate = generate
        self._door = door
        self._root_path = root_path.rstrip("/")
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._root_path)
        try:
            if path in {"/generate", "/generate/"}:
                refuse_foreign_page(scope["headers"])
                refuse_without_key(scope["headers"], self._api_keys)
                await self._generate(scope, receive, send)
            elif path.startswith(_GENERATING) and path not in _NOT_GENERATING:
                await self._through_door(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _through_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._door.leave()


def api_keys_of(args: Any) -> list[str]:
    """The keys that vLLM asks for under `/v1`, asked for under `/generate` as well."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
