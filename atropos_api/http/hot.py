"""The calls made all the time go straight to their handlers, past what the framework does for each request.

They are routes of the application all the same: documented, and reached by every other method and path as usual. Where
nothing has to be waited for, not even ASGI lies between (`PromptCalls`); whatever is large, compressed, held back or
comes from a browser goes through the application (`HotRoutes`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.errors import BrokerError
from atropos_api.http import v0, v1
from atropos_api.http.answer_steps import steps_of
from atropos_api.http.asked import Asked
from atropos_api.http.door import Door, changes_something
from atropos_api.http.problems import answer_broker_error, answer_client_gone, answer_error
from atropos_api.http.services import Services
from atropos_api.store.steps import pass_by

Handler = Callable[[Request], Awaitable[Response]]
PromptHandler = Callable[[Services, Asked], Response | None]
"""None: this one has to go the long way. Nothing was answered, and what was done may be done again."""

LARGEST_BODY_BYTES: Final = 1 << 20
"""What is larger takes so long that others should have a turn in between."""

HANDLERS: Final[Mapping[tuple[str, str], tuple[Handler, PromptHandler]]] = {
    ("POST", "/v1/groups"): (v1.submit, v1.answer_submit),
    ("GET", "/status-env"): (v0.status_env, v0.answer_status_env),
    ("POST", "/scored_data"): (v0.scored_data, v0.answer_scored_data),
    ("POST", "/scored_data_list"): (v0.scored_data_list, v0.answer_scored_data_list),
    ("GET", "/batch"): (v0.batch, v0.answer_batch),
}


class HotRoutes:
    """ASGI middleware, innermost: door and waiting for the disk lie around it as around every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = HANDLERS.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        handler, _ = found
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except BrokerError as error:
            response = answer_broker_error(request, error)
        except ClientDisconnect as error:
            response = answer_client_gone(request, error)
        await response(scope, receive, send)


class PromptCall:
    """One route that a connection may ask directly."""

    def __init__(self, services: Services, door: Door, method: str, path: str) -> None:
        self.changes_something = changes_something(method, path)
        self.reach = services.broker.state.reach if self.changes_something else pass_by
        self.steps = steps_of(method)
        self.most_bytes = min(LARGEST_BODY_BYTES, services.config.max_body_bytes)
        self._services = services
        self._door = door
        self._method, self._path = method, path
        _, self._handler = HANDLERS[method, path]

    def answer(self, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> Response | None:
        """The answer, be it a refusal; None if the request has to go through the application."""
        if self._services.broker.state.torn:
            return None
        refusal = self._door.refuse(self._method, self._path, headers)
        if refusal is not None:
            return refusal
        try:
            return self._handler(self._services, Asked(self._path, query, headers, body))
        except BrokerError as error:
            return answer_error(self._services, self._path, error)


PromptCalls = Mapping[tuple[bytes, bytes], PromptCall]


def make_prompt_calls(services: Services, door: Door, *, syncs: bool) -> PromptCalls:
    """By method and path as they are on the wire. `syncs`: changes wait for the disk, so they go the long way."""
    calls = {(method, path): PromptCall(services, door, method, path) for method, path in HANDLERS}
    return {
        (method.encode(), path.encode()): call
        for (method, path), call in calls.items()
        if not (syncs and call.changes_something)
    }
