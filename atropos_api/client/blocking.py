"""The blocking client: the trainer and scripts use it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from atropos_api.client import connection
from atropos_api.client.calls import BrokerRefused, Call, Calls
from atropos_api.client.connection import Connection
from atropos_api.common.concurrency import Wait

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


def sent(build: Callable[Concatenate[Calls, P], Call[AnswerT]]) -> Callable[Concatenate[BrokerClient, P], AnswerT]:
    """Return the method that sends the call which `build` makes, and returns its answer."""

    @functools.wraps(build)
    def method(self: BrokerClient, /, *args: P.args, **kwargs: P.kwargs) -> AnswerT:
        call = build(self._calls, *args, **kwargs)
        try:
            return call.read(self._send(call))
        except BrokerRefused as refused:
            if not connection.wants_json(refused, call):
                raise
        self._calls = Calls("json")
        return method(self, *args, **kwargs)

    return method


class BrokerClient(Connection[httpx.Client, httpx.BaseTransport]):
    """A client of one broker; usable from several threads. Close it, or use it as a context manager."""

    begin_run = sent(Calls.begin_run)
    finish_run = sent(Calls.finish_run)
    get_batch = sent(Calls.get_batch)
    commit = sent(Calls.commit)
    update_policy = sent(Calls.update_policy)
    get_policy = sent(Calls.get_policy)
    hold_policy = sent(Calls.hold_policy)
    release_policy = sent(Calls.release_policy)
    register_environment = sent(Calls.register_environment)
    leave = sent(Calls.leave)
    heartbeat = sent(Calls.heartbeat)
    lease_items = sent(Calls.lease_items)
    report_dropped = sent(Calls.report_dropped)
    report_run = sent(Calls.report_run)
    report_tokens = sent(Calls.report_tokens)
    submit = sent(Calls.submit)
    renew_server = sent(Calls.renew_server)
    get_servers = sent(Calls.get_servers)
    drain_server = sent(Calls.drain_server)
    remove_server = sent(Calls.remove_server)
    renew_fleet = sent(Calls.renew_fleet)
    get_fleets = sent(Calls.get_fleets)
    scale_fleet = sent(Calls.scale_fleet)
    remove_fleet = sent(Calls.remove_fleet)
    status = sent(Calls.status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def wait_until_ready(self, timeout_seconds: float = 600.0, on_wait: Callable[[str], None] | None = None) -> None:
        """Return as soon as the broker is ready; `on_wait` is called with one line every ten seconds."""
        wait = Wait(timeout_seconds)
        while (error := self._probe()) is not None:
            connection.report_wait(wait, self.url, error, on_wait, answered=self._answered)
            time.sleep(connection.READY_POLL_SECONDS)

    def _open(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def _probe(self) -> Exception | None:
        try:
            response = self._http.get("/readyz", timeout=5.0)
        except httpx.TransportError as error:
            return error
        self._answered = True
        if response.status_code in {401, 403}:
            connection.raise_for_problem(response)
        return None if response.is_success else ConnectionError(f"it answers {response.status_code}")

    def _send(self, call: Call[Any]) -> httpx.Response:
        started = time.monotonic()
        attempt = 0
        while True:
            outcome = self._attempt(call)
            waited = time.monotonic() - started
            delay = connection.retry_delay(attempt, outcome)
            self._auth.note(outcome)
            again = connection.should_retry(call, outcome, answered=self._answered)
            again = again or self._auth.awaits_replacement(outcome)
            if not again or waited + delay > self._retry_seconds:
                return connection.settle(self.url, outcome, waited_seconds=waited, answered=self._answered)
            time.sleep(delay)
            attempt += 1

    def _attempt(self, call: Call[Any]) -> httpx.Response | httpx.TransportError:
        timeout = httpx.Timeout(self._timeout_seconds, read=self._timeout_seconds + call.extra_seconds)
        try:
            response = self._http.request(
                call.method,
                call.path,
                params=call.params,
                headers=call.headers,
                content=call.content,
                timeout=timeout,
            )
        except httpx.TransportError as error:
            return error
        self._answered = True
        return response
