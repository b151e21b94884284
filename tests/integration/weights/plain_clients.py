"""Clients that are unaware of versions, publishes and restarts: they keep connections and never retry."""

from __future__ import annotations

import bisect
import http.client
import itertools
import json
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    path: str
    started: float
    ended: float
    version: int | None
    body: dict


class PlainClients:
    """Threads with a connection each, which request `/generate` and `/v1/completions` in turn, and one that
    polls `/bridge/info`. `requests` gives the path and body of a client's nth request; `read` the version of an answer.
    """

    def __init__(self, url, requests, read, *, clients=24, pause_seconds=0.0, patience_seconds=300.0):
        self.answers, self.failures = [], []
        self._place, self._requests, self._read = urlsplit(url), requests, read
        self._pause_seconds, self._patience_seconds = pause_seconds, patience_seconds
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        self._threads.append(threading.Thread(target=self._poll, daemon=True))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * self._patience_seconds)
            assert not thread.is_alive()

    def _ask(self, number):
        connection = self._connect()
        for turn in itertools.count():
            if self._stop.wait(self._pause_seconds):
                break
            path, body = self._requests(number, turn)
            self._exchange(connection, "POST", path, body)
        connection.close()

    def _poll(self):
        connection = self._connect()
        while not self._stop.wait(0.02):
            self._exchange(connection, "GET", "/bridge/info", None)
        connection.close()

    def _connect(self):
        return http.client.HTTPConnection(self._place.hostname, self._place.port, timeout=self._patience_seconds)

    def _exchange(self, connection, method, path, body):
        started = time.monotonic()
        try:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, path, sent, {"Content-Type": "application/json"} if sent else {})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, (response.status, text[:300])
            answer = self._read(path, response, text)
            self.answers.append(Answer(path, started, time.monotonic(), answer["version"], answer | {"sent": sent}))
        except Exception as error:
            self.failures.append((path, round(started, 3), round(time.monotonic(), 3), repr(error)))
            connection.close()

    def falling(self):
        """Return answers of an older version than one that any client had seen before their request."""
        seen = sorted((answer.ended, answer.version) for answer in self.answers if answer.version is not None)
        newest = list(itertools.accumulate((version for _, version in seen), max))
        times, fallen = [ended for ended, _ in seen], []
        for answer in self.answers:
            if answer.version is None:  # its route returns none
                continue
            before = bisect.bisect_left(times, answer.started)
            if before and answer.version < newest[before - 1]:
                fallen.append((answer, newest[before - 1]))
        return fallen
