"""The one client that drives every server: HTTP on kept connections, or a new one a request as legacy clients do."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

TIMEOUT_SECONDS = 600

_keys = itertools.count()


class Answer(NamedTuple):
    """What came back."""

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
        """Send and read whole; an answer that is not a success is an error here."""
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
        """As `request`, for small JSON."""
        body = None if content is None else json.dumps(content).encode()
        return json.loads(self.request(method, path, body, content_type="application/json", **headers).body or b"null")

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_SECONDS)
            self._local.connection = connection
        return connection


def new_key() -> str:
    """An idempotency key; the reference does not know them and ignores the header."""
    return f"key-{next(_keys):032d}"


def at_once(calls: Sequence[Callable[[], object]], pool: ThreadPoolExecutor) -> None:
    for future in [pool.submit(call) for call in calls]:
        future.result()
