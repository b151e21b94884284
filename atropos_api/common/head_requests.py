"""HEAD requests, which load balancers and `curl -I` send: FastAPI's routes for GET refuse them.

It is a module of its own because the broker and the inference server both use it.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_PATH: Final = re.compile(r"(?!)")


class HeadAsGet:
    """ASGI middleware: it passes a HEAD request on as a GET and sends the answer's head alone.

    An endless answer ends there too, because a server tells the application that the caller has disconnected.
    """

    def __init__(self, app: ASGIApp, *, unsafe: re.Pattern[str] = NO_PATH) -> None:
        """Keep the arguments; `unsafe` matches the paths whose GET changes something or costs much: a HEAD must not."""
        self._app = app
        self._unsafe = unsafe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or self._unsafe.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
