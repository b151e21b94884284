"""Limits on connections: on their number, on the size of headers, and on the time for which they may stall.

uvicorn waits without limit for the rest of a request and for a peer to read the answer. `GuardedProtocol` records what
each connection waits for, and `sweep`, called once a second over all connections, closes those that waited too long.
So no request needs a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from atropos_api.common.http_upgrades import UpgradeIgnored
from atropos_api.http.problems import problem_response

MOST_UNPARSED_BYTES: Final = 64 * 1024
"""Limit on bytes in a row that are not part of a body: headers, trailers, chunk extensions."""

LEAST_BYTES_PER_SECOND: Final = 1024
"""A body or an answer that is slower than this over a whole window is stalled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """The limits: how many connections there may be, and how long each may wait in each state."""

    max_connections: int = 4096
    header_seconds: float = 10.0
    stall_seconds: float = 30.0
    idle_seconds: float = 75.0


SILENT_SECONDS: Final = 1.0
"""If there are too many connections, one that sent no request for this long is closed in favour of a newer one."""


LINGER_SECONDS: Final = 2.0
"""Time for which the input of a refused peer is read and discarded, so that it can read the refusal."""


class _Waiting(Enum):
    NOTHING = auto()
    HEADERS = auto()
    BODY = auto()


class GuardedProtocol(UpgradeIgnored):
    """One connection: it records the wait for the peer's headers, for its body, or for it to read the answer."""

    def __init__(self, *args: Any, timeouts: Timeouts, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeouts = timeouts
        self._awaited = _Waiting.HEADERS
        self._since = self.loop.time()
        self._moved_bytes = 0
        self._unparsed_bytes = 0
        self.begun_at_once = 0
        """Number of requests that began in the piece of input being parsed."""
        self.has_sent_request = False
        self._unread_since: float | None = None
        self._unread_bytes = 0
        self._disconnected: asyncio.Future[None] | None = None
        self._refused = False
        self.unwritten = False
        """True if the transport holds bytes the kernel has not taken; exact only with a write buffer limit of 0."""

    @property
    def is_open(self) -> bool:
        return not (self._refused or self.transport.is_closing())

    def age(self) -> float:
        """Return the seconds since the present wait for the peer began."""
        return self.loop.time() - self._since

    @property
    def disconnected(self) -> asyncio.Future[None]:
        """A future that is done once the peer has disconnected, so that waits on its behalf can stop."""
        if self._disconnected is None:
            self._disconnected = self.loop.create_future()
            if not self.is_open:
                self._disconnected.set_result(None)
        return self._disconnected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._timeouts.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._disconnected is not None and not self._disconnected.done():
            self._disconnected.set_result(None)

    def pause_writing(self) -> None:
        self.unwritten = True
        super().pause_writing()

    def resume_writing(self) -> None:
        # Called only once the buffer has drained: when a connection is lost, uvicorn wakes its writers another way.
        self.unwritten = False
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self.begun_at_once = 0
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes and self._awaited is _Waiting.NOTHING:
            # Line ends between requests begin no message; sending them slowly must not keep a connection open.
            self._awaited, self._since = _Waiting.HEADERS, self.loop.time()
        if self._unparsed_bytes > MOST_UNPARSED_BYTES:
            self.close_with(431, "headers-too-large", f"more than {MOST_UNPARSED_BYTES} bytes of headers")

    def on_message_begin(self) -> None:
        # As in uvicorn, except for the scope: `take_head` makes it for those requests that need one.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self.begun_at_once += 1
        self._start_wait(_Waiting.HEADERS)

    def on_headers_complete(self) -> None:
        if self.ignores_head:
            return
        self.has_sent_request = True
        self._start_wait(_Waiting.BODY)
        self.take_head()

    def on_body(self, body: bytes) -> None:
        self._moved_bytes += len(body)
        self._unparsed_bytes = 0
        self.take_piece(body)

    def on_message_complete(self) -> None:
        if self.ignores_head:
            return
        self._awaited = _Waiting.NOTHING
        self._unparsed_bytes = 0
        self.take_end()

    def take_head(self) -> None:
        """Begin a request whose headers are complete: uvicorn handles it, unless a subclass does."""
        url, headers, expected = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expected
        self.scope["headers"] = self.headers = headers
        super().on_headers_complete()

    def take_piece(self, piece: bytes) -> None:
        super().on_body(piece)

    def take_end(self) -> None:
        super().on_message_complete()

    def current_cycle(self) -> RequestResponseCycle | None:
        """Return the cycle of the latest request, or None if that request has none."""
        return self.cycle

    def send_400_response(self, msg: str) -> None:
        self.close_with(400, "malformed-request", msg)

    def shutdown(self) -> None:
        """Stop; a peer that is still sending a body gets a 503 to retry later, instead of being waited for."""
        if self._awaited is _Waiting.BODY:
            self.close_with(503, "stopping", "the broker is being stopped; nothing of this request was kept")
        super().shutdown()

    def check(self, now: float) -> None:
        """Close this connection if it has waited for its peer for too long."""
        if self.transport.get_write_buffer_size() > 0:
            self._check_reader(now)
            return
        self._unread_since = None
        waited = now - self._since
        if self._awaited is _Waiting.HEADERS and waited > self._timeouts.header_seconds:
            self.close_with(408, "request-timeout", f"no complete request arrived within {waited:.0f} s")
        elif self._awaited is _Waiting.BODY and waited > self._timeouts.stall_seconds:
            self._check_body(now)
        elif waited > self._timeouts.idle_seconds and self._is_idle():
            self.transport.close()

    def _start_wait(self, what: _Waiting) -> None:
        self._awaited = what
        self._since = self.loop.time()
        self._moved_bytes = 0
        self._unparsed_bytes = 0

    def _is_idle(self) -> bool:
        """Return True if there is no request, and no timer of uvicorn's (set after its own answers) will close it."""
        cycle = self.current_cycle()
        answered = cycle is None or cycle.response_complete
        return self._awaited is _Waiting.NOTHING and answered and self.timeout_keep_alive_task is None

    def _check_body(self, now: float) -> None:
        enough = self._moved_bytes >= LEAST_BYTES_PER_SECOND * self._timeouts.stall_seconds
        cycle = self.current_cycle()
        answered = cycle is not None and cycle.response_complete
        if answered or not (enough or self.flow.read_paused):
            self.close_with(408, "request-timeout", f"the body was too slow for {self._timeouts.stall_seconds:g} s")
        else:
            self._since, self._moved_bytes = now, 0

    def _check_reader(self, now: float) -> None:
        """Abort the connection if the peer reads too slowly, because its answer stays in our memory."""
        unread = self.transport.get_write_buffer_size()
        if self._unread_since is None or unread > self._unread_bytes:
            self._unread_since, self._unread_bytes = now, unread
        elif now - self._unread_since > self._timeouts.stall_seconds:
            if self._unread_bytes - unread < min(LEAST_BYTES_PER_SECOND * self._timeouts.stall_seconds, unread):
                self.transport.abort()
            self._unread_since, self._unread_bytes = now, unread

    def _make_room(self) -> None:
        """Close one of too many connections: the oldest that never sent a request, or else this newest one."""
        others = [other for other in self.connections if isinstance(other, GuardedProtocol) and other.is_open]
        if len(others) > self._timeouts.max_connections:
            silent = [other for other in others if not other.has_sent_request and other.age() > SILENT_SECONDS]
            victim = max(silent, key=GuardedProtocol.age, default=self)
            victim.close_with(503, "too-many-connections", "no more connections are accepted (--max-connections)")

    def close_with(self, status: int, kind: str, detail: str) -> None:
        """Close the connection; answer with the reason first if the peer still awaits an answer."""
        if not self.is_open:
            return
        answers = self._awaits_answer()
        if answers:
            self.transport.write(_render_problem(status, kind, detail))
        cycle = self.current_cycle()
        if answers and (cycle is None or cycle.response_complete):
            self._linger()
        else:
            self.transport.close()
        self._awaited = _Waiting.NOTHING

    def _linger(self) -> None:
        """End the answer, and close a moment later: a close with input unread resets the connection, and the peer loses
        the answer.
        """
        self._refused = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _awaits_answer(self) -> bool:
        cycle = self.current_cycle()
        if cycle is None or not cycle.response_started:
            return True
        return cycle.response_complete and self._awaited is _Waiting.HEADERS


def _render_problem(status: int, kind: str, detail: str) -> bytes:
    response = problem_response(status, kind, detail)
    headers = [b"%b: %b\r\n" % header for header in response.raw_headers]
    return b"".join((STATUS_LINE[status], *headers, b"connection: close\r\n\r\n", response.body))


def sweep(connections: Iterable[object]) -> None:
    """Check all connections of a server."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        if isinstance(connection, GuardedProtocol):
            connection.check(now)
