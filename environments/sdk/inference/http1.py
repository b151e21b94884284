"""A small HTTP/1.1 client for one kind of call: JSON to an inference server and back, hundreds of times a second.

General clients cost a millisecond of CPU a request, most of it in searching their pools; beside a model on the same
cores that is tokens lost. Here an idle connection is the top of a stack, and a closed one takes itself off.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Http1Client:
    """Connections to any number of origins, kept open between requests."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def request(self, method: str, url: str, body: bytes | None) -> Response:
        """Send and await the whole answer; raises `OSError` when the connection fails."""
        parts = urlsplit(url)
        origin = (parts.scheme, parts.netloc)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        length = f"Content-Length: {len(body)}\r\n" if body is not None else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{self._headers}{length}\r\n"
        message = head.encode("latin-1") + (body or b"")
        idle = self._idle.setdefault(origin, [])
        while idle:
            connection = idle.pop()
            try:
                return await self._exchange(connection, message, idle)
            except ClosedBeforeAnswer:
                continue  # the server had just closed what was idle; it has not seen the request
        return await self._exchange(await self._connect(parts.scheme, parts.hostname or "", parts.port), message, idle)

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
            connections.clear()

    async def _exchange(self, connection: _Connection, message: bytes, idle: list[_Connection]) -> Response:
        try:
            response = await connection.send(message)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self, scheme: str, host: str, port: int | None) -> _Connection:
        loop = asyncio.get_running_loop()
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if scheme == "https" else None
        _, connection = await loop.create_connection(
            _Connection, host, port or (443 if scheme == "https" else 80), ssl=tls
        )
        return connection


class ClosedBeforeAnswer(ConnectionResetError):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection; answers one request at a time. The parser calls the `on_*` methods."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._keep_alive = True
        self._received = False

    @property
    def reusable(self) -> bool:
        return self._keep_alive and not self.closed

    async def send(self, message: bytes) -> Response:
        if self.closed or self._transport is None:
            raise ClosedBeforeAnswer("the connection was closed while idle")
        self._answer = asyncio.get_running_loop().create_future()
        self._received = False
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._received:
            self._fail(ConnectionResetError("the connection ended in the middle of an answer"))
        else:
            self._fail(ClosedBeforeAnswer(str(exc) if exc else "the server closed the connection"))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        content = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._keep_alive = self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Response(self._parser.get_status_code(), content))

    def _fail(self, error: OSError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
