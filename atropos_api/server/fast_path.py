"""The most frequent calls are answered without the work that the framework does for each request.

They are ordinary routes all the same: documented, and with other methods or paths handled as usual. `HotRoutes` calls
their handlers directly within the application. `FastPathProtocol` also avoids ASGI: it answers in the callback that
reads a request's last byte, because a task, an ASGI scope and six messages cost several times what such a call does. It
keeps a request that a call may answer at once until it is whole; if the call declines, the same bytes go through the
application. Unusual requests go there from their head on: large, chunked, compressed or upgrading bodies, browsers,
HTTP/1.0, peers that pipeline more than a few requests or read too slowly.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from atropos_api.errors import BrokerError
from atropos_api.http.auth import BROWSER_HEADERS, RequestGuard, changes_something
from atropos_api.http.connection_limits import GuardedProtocol
from atropos_api.http.context import AppContext
from atropos_api.http.problems import answer_broker_error, answer_client_gone, answer_error, fault_response
from atropos_api.http.request import RequestView
from atropos_api.http.streaming import ChunkedResponse, ConfirmedResponse, has_disconnected, was_written
from atropos_api.routes import servers, v0, v1
from atropos_api.server.group_commit import steps_of
from atropos_api.store.failpoints import ignore_failpoint

Handler = Callable[[Request], Awaitable[Response]]

DirectHandler = Callable[[AppContext, RequestView], Response | None]
"""None: the request must go through the application. Nothing was answered, and what was done may be done again."""

LARGEST_BODY_BYTES: Final = 1 << 20
"""A larger body takes so long that other requests should be served in between."""

HANDLERS: Final[Mapping[tuple[str, str], tuple[Handler, DirectHandler]]] = {
    ("POST", "/v1/groups"): (v1.submit, v1.answer_submit),
    ("GET", "/status-env"): (v0.status_env, v0.answer_status_env),
    ("POST", "/scored_data"): (v0.scored_data, v0.answer_scored_data),
    ("POST", "/scored_data_list"): (v0.scored_data_list, v0.answer_scored_data_list),
    ("GET", "/batch"): (v0.batch, v0.answer_batch),
}

WAITING: Final[Mapping[tuple[str, str], Handler]] = {("GET", "/v1/servers"): servers.list_servers}
"""Frequent calls that may wait, so that no connection can answer them itself."""

NAMED: Final[Mapping[tuple[str, str], Callable[[Request, str], Awaitable[Response]]]] = {
    ("PUT", "/v1/servers"): servers.renew,
}
"""The same for paths whose last part is a name."""


class HotRoutes:
    """ASGI middleware for the frequent calls: it is innermost, so the request guard and the sync surround it too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = find_handler(scope["method"], scope["path"]) if scope["type"] == "http" else None
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


def find_handler(method: str, path: str) -> Handler | None:
    """Return the handler of a frequent call; None for any other."""
    if (found := HANDLERS.get((method, path))) is not None:
        return found[0]
    if (waiting := WAITING.get((method, path))) is not None:
        return waiting
    parent, _, name = path.rpartition("/")
    named = NAMED.get((method, parent))
    return None if named is None else partial(_named, named, name)


def _named(handler: Callable[[Request, str], Awaitable[Response]], name: str, request: Request) -> Awaitable[Response]:
    return handler(request, name)


class DirectCall:
    """One route: a connection may call it directly."""

    def __init__(self, context: AppContext, guard: RequestGuard, method: str, path: str) -> None:
        self.changes_something = changes_something(method, path)
        self.reach = context.broker.state.reach if self.changes_something else ignore_failpoint
        self.steps = steps_of(method)
        self.most_bytes = min(LARGEST_BODY_BYTES, context.config.max_body_bytes)
        self._context = context
        self._guard = guard
        self._method, self._path = method, path
        _, self._handler = HANDLERS[method, path]

    def answer(self, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> Response | None:
        """Return the answer, which may be a refusal; None if the request has to go through the application."""
        if self._context.broker.state.store_inconsistent:
            return None
        refusal = self._guard.refuse(self._method, self._path, headers)
        if refusal is not None:
            return refusal
        try:
            return self._handler(self._context, RequestView(self._path, query, headers, body))
        except BrokerError as error:
            return answer_error(self._context, self._path, error)


DirectCalls = Mapping[tuple[bytes, bytes], DirectCall]


def make_direct_calls(context: AppContext, guard: RequestGuard, *, syncs: bool) -> DirectCalls:
    """Return the calls by method and path on the wire. With `syncs`, changes wait for the disk and are left out."""
    calls = {(method, path): DirectCall(context, guard, method, path) for method, path in HANDLERS}
    return {
        (method.encode(), path.encode()): call
        for (method, path), call in calls.items()
        if not (syncs and call.changes_something)
    }


logger = logging.getLogger(__name__)


class HasDirectCalls(Protocol):
    """An application with calls that connections may make directly."""

    @property
    def direct_calls(self) -> DirectCalls: ...


MOST_IN_A_ROW: Final = 16
"""Limit on direct answers to one piece of input; others are served before the rest."""

SLOW_PATH_HEADERS: Final = BROWSER_HEADERS | {b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"}


class FastPathProtocol(GuardedProtocol):
    """A connection that answers some calls itself: the `direct_calls` of `source` at that time."""

    def __init__(self, *args: Any, source: HasDirectCalls, **options: Any) -> None:
        super().__init__(*args, **options)
        self._source = source
        self._call: DirectCall | None = None
        self._query = b""
        self._pieces: list[bytes] = []
        self._answered_directly = False
        self._closing = False

    def current_cycle(self) -> RequestResponseCycle | None:
        return None if self._call is not None or self._answered_directly else self.cycle

    def take_head(self) -> None:
        self._call = self._find_call()
        self._answered_directly = False
        if self._call is None and not self._closing:
            super().take_head()

    def take_piece(self, piece: bytes) -> None:
        if self._call is not None:
            self._pieces.append(piece)
        elif not self._closing:
            super().take_piece(piece)

    def take_end(self) -> None:
        call, pieces = self._call, self._pieces
        if call is None:
            if not self._closing:
                super().take_end()
            return
        self._call, self._pieces = None, []
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        response = self._ask(call, body)
        if response is not None:
            self._answered_directly = True
            self._send(response, call)
            return
        super().take_head()
        if body:
            super().take_piece(body)
        super().take_end()

    def _find_call(self) -> DirectCall | None:
        path, _, self._query = self.url.partition(b"?")
        call = self._source.direct_calls.get((self.parser.get_method(), path))
        if call is None or self.begun_at_once > MOST_IN_A_ROW or self.flow.write_paused or self._closing:
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        if self.parser.get_http_version() != "1.1" or not self._is_ordinary(call):
            return None
        return call

    def _is_ordinary(self, call: DirectCall) -> bool:
        shown = dict(self.headers)
        return SLOW_PATH_HEADERS.isdisjoint(shown) and int(shown.get(b"content-length", 0)) <= call.most_bytes

    def _ask(self, call: DirectCall, body: bytes) -> Response | None:
        try:
            return call.answer(self._query, self.headers, body)
        except Exception:  # the parser would report it as a malformed request
            logger.exception("a call failed")
            return fault_response()

    def _send(self, response: Response, call: DirectCall) -> None:
        keep = self.parser.should_keep_alive()
        self._closing = not keep
        body = response.pieces if isinstance(response, ChunkedResponse) else [bytes(response.body)]
        pieces = [self._render_head(response, keep=keep), *body]
        if not isinstance(response, ConfirmedResponse):
            self._write(pieces, call)
            self._end(call)
            return
        disconnected = has_disconnected(self.transport)
        # With a buffer limit of 0, the kernel's part is written at once, and it is known if anything is left.
        self.transport.set_write_buffer_limits(high=0)
        self._write(pieces, call)
        if self.flow.write_paused and not self.transport.is_closing():
            task = self.loop.create_task(self._report_when_written(response, call, disconnected=disconnected))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            response.on_result(not disconnected and was_written(self.transport))
            self._end(call)

    def _write(self, pieces: list[bytes], call: DirectCall) -> None:
        if call.reach is ignore_failpoint:
            self.transport.writelines(pieces)
            return
        data = b"".join(pieces)
        call.reach(call.steps.begun)
        self.transport.write(data[: len(data) // 2])
        call.reach(call.steps.torn)
        self.transport.write(data[len(data) // 2 :])

    async def _report_when_written(self, response: ConfirmedResponse, call: DirectCall, *, disconnected: bool) -> None:
        try:
            await self.flow.drain()
        finally:
            response.on_result(not disconnected and was_written(self.transport))
        self._end(call)

    def _end(self, call: DirectCall) -> None:
        if self._closing:
            self.transport.close()
        call.reach(call.steps.ended)

    def _render_head(self, response: Response, *, keep: bool) -> bytes:
        headers = (*self.server_state.default_headers, *response.raw_headers)
        lines = [b"%b: %b\r\n" % header for header in headers]
        last = b"\r\n" if keep else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINE[response.status_code], *lines, last))
