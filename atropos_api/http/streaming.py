"""Answers sent piece by piece, answers whose arrival is confirmed, and long polls.

`ChunkedResponse` sends pieces as they are stored; `ConfirmedResponse` also reports if they arrived. `ReadOut` keeps a
closing connection from losing an answer. `LongPoll` waits until the time that a caller asked for is over, the caller
disconnects, or the broker stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_api.common.concurrency import Notifier
from atropos_api.http.connection_limits import GuardedProtocol
from atropos_api.http.context import context_of

logger = logging.getLogger(__name__)

TRANSPORT_KEY: Final = "atropos.transport"
"""Key under which `BrokerApp` puts the connection's transport in the scope, if the server exposes it."""

HUNG_UP: Final[int | None] = getattr(select, "POLLRDHUP", None)
"""The flag by which Linux reports a connection whose peer sends no more."""

SHARED_END_SECONDS: Final = 0.25
"""Long polls of many callers end together, at multiples of this, up to so much early: answers that share a wake-up of
the event loop find the processor's caches warm."""

LONG_WAIT_SECONDS: Final = 2.0
"""Shorter waits end at their own time."""

JOINED_BYTES: Final = 1 << 16
"""Smaller pieces are joined, because each send costs time; larger ones are not, because copying costs more."""


def find_transport(send: Send) -> asyncio.Transport | None:
    """Return the transport that uvicorn's `send`, a method of the request's cycle, holds; other servers give None."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport if hasattr(transport, "get_write_buffer_size") else None


def coalesce(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in fewer pieces; large pieces are not copied."""
    small: list[bytes] = []
    size = 0
    for piece in pieces:
        if small and size + len(piece) > JOINED_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(piece) >= JOINED_BYTES:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    if small:
        yield b"".join(small)


class ChunkedResponse(Response):
    """A response in pieces: its body is never joined as a whole in memory."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        media_type: str,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Only this much of what the base class prepares is needed.
        self.pieces = list(coalesce(pieces)) if len(pieces) > 1 else pieces
        self.status_code = status_code
        self.background = None
        self.raw_headers = [
            (b"content-length", b"%d" % sum(map(len, self.pieces))),
            (b"content-type", media_type.encode("latin-1")),
        ]
        for name, value in (headers or {}).items():
            self.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's form
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = self.pieces[-1]
        for piece in self.pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})


class ConfirmedResponse(ChunkedResponse):
    """A response that waits until every byte has left this process, and then reports the result to `on_result`."""

    def __init__(self, pieces: Sequence[bytes], *, on_result: Callable[[bool], None], **options: Any) -> None:
        super().__init__(pieces, **options)
        self.on_result = on_result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's form
        accepted = False
        try:
            accepted = await self._send_all(scope, send)
        finally:
            self.on_result(accepted)

    async def _send_all(self, scope: Scope, send: Send) -> bool:
        transport: asyncio.Transport | None = scope.get(TRANSPORT_KEY)
        disconnected = transport is not None and has_disconnected(transport)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        accepted = not disconnected and await _wait_until_written(transport, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return accepted


async def _wait_until_written(transport: asyncio.Transport | None, send: Send) -> bool:
    """Return once the kernel has every byte (True), or the connection broke before it had (False).

    A peer that closes the connection after the last byte is not a failure: many close it at once.
    """
    if transport is None:
        return True
    if transport.is_closing():
        return False
    # With a buffer limit of 0, the protocol is paused while anything is unwritten, and sending waits for that.
    transport.set_write_buffer_limits(high=0)
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    return was_written(transport)


def has_disconnected(transport: asyncio.Transport) -> bool:
    """Return True if the peer has closed its side already. Call it before the first byte: many close after the last.

    If a caller timed out while the broker was stopped, its request and its close are read together, and the kernel
    would still take an answer. If the kernel cannot be asked this way, the peer counts as connected.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0 or HUNG_UP is None:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), HUNG_UP)
    return bool(poll.poll(0))


def was_written(transport: asyncio.Transport) -> bool:
    """Return True if the kernel took every byte; the write buffer limit must have been 0 since before the first.

    For a closed connection this is the state when the protocol was last paused or resumed.
    """
    if not transport.is_closing():
        transport.set_write_buffer_limits()
        return transport.get_write_buffer_size() == 0
    protocol = transport.get_protocol()
    return isinstance(protocol, GuardedProtocol) and not protocol.unwritten


class ReadOut:
    """ASGI middleware: where the connection closes after the answer, it reads the rest of the request's body first.

    A system that closes a connection with unread input resets it, and the peer may then lose the answer.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_read_out(scope):
            await self._app(scope, receive, send)
            return
        is_unread = True

        async def receive_part() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and is_unread:
                await send({**message, "more_body": True})
                size = 0
                while is_unread and size <= self._most_bytes:
                    size += len((await receive_part()).get("body", b""))
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_part, send_part)


def _is_read_out(scope: Scope) -> bool:
    """Return True if the connection closes after the answer, and its peer sends a body without being asked to."""
    headers = dict(scope["headers"])
    closes = scope["http_version"] == "1.0" or b"close" in headers.get(b"connection", b"").lower()
    return closes and b"expect" not in headers


class LongPoll:
    """One caller's long poll: its time may be spent over as many waits as the answer takes."""

    def __init__(self, request: Request, seconds: float) -> None:
        self._context = context_of(request)
        self._transport = request.scope.get(TRANSPORT_KEY)
        self._deadline = time.monotonic() + seconds
        if seconds >= LONG_WAIT_SECONDS:
            self._deadline -= self._deadline % SHARED_END_SECONDS

    async def on(self, notifier: Notifier, *, at_most: float = math.inf) -> bool:
        """Wait for the notifier; return False if time is up, the broker stops or the caller has disconnected."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or self._context.stopping or self._is_closing():
            return False
        await notifier.wait(min(remaining, at_most), until=self._disconnected())
        # For a caller that is gone the handler must not look again: that would count as a call after it has left.
        return not self._is_closing()

    def _is_closing(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    def _disconnected(self) -> asyncio.Future[None] | None:
        protocol = self._transport.get_protocol() if self._transport is not None else None
        return protocol.disconnected if isinstance(protocol, GuardedProtocol) else None
