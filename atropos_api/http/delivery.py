"""Answers whose arrival matters: told afterwards whether the transport took the last byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

TRANSPORT_KEY: Final = "atropos.transport"
"""Where the door leaves the connection's transport in the scope, when the server shows it."""

CHUNK_BYTES: Final = 1 << 20


def find_transport(send: Send) -> asyncio.Transport | None:
    """Uvicorn's `send` is a method of the request's cycle, which holds the transport; other servers show none."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport if hasattr(transport, "get_write_buffer_size") else None


class TrackedResponse(Response):
    """Sends the body so that every byte has left this process before the end, then says how it went."""

    def __init__(self, content: bytes, *, on_result: Callable[[bool], None], **options: Any) -> None:
        super().__init__(content, **options)
        self._on_result = on_result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's form
        accepted = False
        try:
            accepted = await self._send_all(scope, send)
        finally:
            self._on_result(accepted)

    async def _send_all(self, scope: Scope, send: Send) -> bool:
        transport: asyncio.Transport | None = scope.get(TRANSPORT_KEY)
        if transport is not None:
            # With no room to buffer, each send waits until the kernel has the bytes before (or the connection is gone).
            transport.set_write_buffer_limits(high=0)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = bytes(self.body)
        for start in range(0, len(body), CHUNK_BYTES):
            chunk = body[start : start + CHUNK_BYTES]
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        accepted = transport is None or (not transport.is_closing() and transport.get_write_buffer_size() == 0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits()
        return accepted
