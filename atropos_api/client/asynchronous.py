"""The async client: environments use it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
import httpx

from atropos_api.client import connection
from atropos_api.client.calls import BrokerRefused, Call, Calls
from atropos_api.client.connection import Connection
from atropos_api.common.concurrency import Wait

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


def sent(
    build: Callable[Concatenate[Calls, P], Call[AnswerT]],
) -> Callable[Concatenate[AsyncBrokerClient, P], Coroutine[Any, Any, AnswerT]]:
    """Return the method that sends the call which `build` makes, and returns its answer."""

    @functools.wraps(build)
    async def method(self: AsyncBrokerClient, /, *args: P.args, **kwargs: P.kwargs) -> AnswerT:
        call = build(self._calls, *args, **kwargs)
        try:
            return call.read(await self._send(call))
        except BrokerRefused as refused:
            if not connection.wants_json(refused, call):
                raise
        self._calls = Calls("json")
        return await method(self, *args, **kwargs)

    return method


class AsyncBrokerClient(Connection[httpx.AsyncClient, httpx.AsyncBaseTransport]):
    """A client of one broker. Close it, or use it as an async context manager."""

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
    report_activity = sent(Calls.report_activity)
    submit = sent(Calls.submit)
    renew_server = sent(Calls.renew_server)
    get_servers = sent(Calls.get_servers)
    drain_server = sent(Calls.drain_server)
    remove_server = sent(Calls.remove_server)
    status = sent(Calls.status)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def wait_until_ready(
        self, timeout_seconds: float = 600.0, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """Return as soon as the broker is ready; `on_wait` is called with one line every ten seconds."""
        wait = Wait(timeout_seconds)
        while (error := await self._probe()) is not None:
            connection.report_wait(wait, self.url, error, on_wait, answered=self._answered)
            await anyio.sleep(connection.READY_POLL_SECONDS)

    def _open(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def _probe(self) -> Exception | None:
        try:
            response = await self._http.get("/readyz", timeout=5.0)
        except httpx.TransportError as error:
            return error
        self._answered = True
        if response.status_code in {401, 403}:
            connection.raise_for_problem(response)
        return None if response.is_success else ConnectionError(f"it answers {response.status_code}")

    async def _send(self, call: Call[Any]) -> httpx.Response:
        started = time.monotonic()
        attempt = 0
        while True:
            outcome = await self._attempt(call)
            waited = time.monotonic() - started
            delay = connection.retry_delay(attempt, outcome)
            self._auth.note(outcome)
            again = connection.should_retry(call, outcome, answered=self._answered)
            again = again or self._auth.awaits_replacement(outcome)
            if not again or waited + delay > self._retry_seconds:
                return connection.settle(self.url, outcome, waited_seconds=waited, answered=self._answered)
            await anyio.sleep(delay)
            attempt += 1

    async def _attempt(self, call: Call[Any]) -> httpx.Response | httpx.TransportError:
        timeout = httpx.Timeout(self._timeout_seconds, read=self._timeout_seconds + call.extra_seconds)
        try:
            response = await self._http.request(
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
