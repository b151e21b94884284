"""The client that drives every server: HTTP on persistent connections, or, as legacy clients, a new one per request."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from typing import Any, NamedTuple, Self

TIMEOUT_SECONDS = 600
RECEIVE_BYTES = 1 << 18

_keys = itertools.count()


class Answer(NamedTuple):
    """The server's answer to one request."""

    status: int
    encoding: str
    body: bytes


class Client:
    """Requests to one port from any thread, each with a connection of its own."""

    def __init__(self, port: int, *, keep: bool = True) -> None:
        self._port = port
        self._keep = keep
        self._local = threading.local()

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send a request and read the whole answer; raise if it is not a success."""
        connection = self._connection()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers.get("content-encoding", ""), response.read())
        if not self._keep:
            connection.close()
        if not 200 <= answer.status < 300:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {answer.body[:300]!r}")
        return answer

    def call(self, method: str, path: str, content: object = None, **headers: str) -> Any:
        """Send a request as `request` does, with a small JSON body."""
        body = None if content is None else json.dumps(content).encode()
        return json.loads(self.request(method, path, body, content_type="application/json", **headers).body or b"null")

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_SECONDS)
            self._local.connection = connection
        return connection


class Line:
    """A connection for timing small requests, with as little work on the client's side as possible."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def time(self, method: str, path: str, body: bytes = b"") -> tuple[float, bytes]:
        """Return the milliseconds from the first byte sent to the last received, and the answer's body."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        began = time.perf_counter()
        self._socket.sendall(request)
        received = self._socket.recv(RECEIVE_BYTES)
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._socket.recv(RECEIVE_BYTES)
        head_lines = received[:end].lower()
        if not head_lines.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{method} {path} was answered {received[:300]!r}")
        pieces = [received[end + 4 :]]
        missing = int(head_lines.partition(b"content-length:")[2].split(b"\r\n")[0]) - len(pieces[0])
        while missing > 0:
            pieces.append(self._socket.recv(RECEIVE_BYTES))
            missing -= len(pieces[-1])
        return 1e3 * (time.perf_counter() - began), b"".join(pieces)


def new_key() -> str:
    """Return an idempotency key; the reference ignores the header."""
    return f"key-{next(_keys):032d}"
