"""The calls made all the time go straight to their handlers, past what FastAPI does for each request.

They are routes of the application all the same: documented, and reached by every other method and path as usual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.errors import BrokerError
from atropos_api.http import v0, v1
from atropos_api.http.problems import answer_broker_error, answer_client_gone

Handler = Callable[[Request], Awaitable[Response]]

HANDLERS: Final[Mapping[tuple[str, str], Handler]] = {
    ("POST", "/v1/groups"): v1.submit,
    ("GET", "/status-env"): v0.status_env,
    ("POST", "/scored_data"): v0.scored_data,
    ("POST", "/scored_data_list"): v0.scored_data_list,
    ("GET", "/batch"): v0.batch,
}


class HotRoutes:
    """ASGI middleware, innermost: door and waiting for the disk lie around it as around every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = HANDLERS.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except BrokerError as error:
            response = answer_broker_error(request, error)
        except ClientDisconnect as error:
            response = answer_client_gone(request, error)
        await response(scope, receive, send)
