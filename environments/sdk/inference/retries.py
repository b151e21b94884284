"""HTTP to one inference server: training and evaluation requests are limited, and wait until an outage is over.

A server that restarts, is paused for a publish or has no policy yet is normal here. While it is unavailable, one
request at a time is repeated as a probe and all others wait for its outcome, so that an outage costs almost nothing and
its end is noticed at once. Only real requests are used to find out whether a server is healthy. If another server is
up, a request moves there instead of waiting; an unavailable server is tried again now and then, by a single request
each time, also while all others are out. Calls to the broker are repeated as `atropos_api.client.connection` decides.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from atropos_api.common.concurrency import Wait
from atropos_api.common.identity import find_host_error
from atropos_api.common.tracing import current_span
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import (
    EnvironmentsError,
    InferenceAborted,
    InferenceHostUnknown,
    InferenceRefused,
    InferenceUnavailable,
)
from environments.sdk.inference.http_transport import HttpTransport, Limit, OnPiece, Response, Timings, Transport
from environments.sdk.inference.sampling import Failover, Split

logger = logging.getLogger(__name__)

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.1, 0.5

FIRST_AVOIDED_SECONDS, LONGEST_AVOIDED_SECONDS = 0.5, 5.0

FAILOVER_CHECK_SECONDS = 0.5
RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
SERVER_ERROR_ATTEMPTS = 3  # a repeated 500 is caused by the request, not by an outage

DEBUG_REQUESTS = "ATROPOS_DEBUG_REQUESTS"
"""The variable by which Atropos, with the value 1, logs the requests to inference servers."""

Outcome = Response | OSError


class ServerUnavailable(EnvironmentsError):
    """The server is unavailable and another one is up: the pool catches this and sends the request to that one."""

    ends_server = False


@dataclass(slots=True)
class _Call:
    method: str
    url: str
    body: bytes | None
    failover: Failover = None
    on_piece: OnPiece | None = None
    attempts: int = 0
    streamed: bool = False
    """True once a part of the answer was passed on, so that the request cannot be repeated."""

    @property
    def may_fail_over(self) -> bool:
        return self.failover is not None and self.failover()


class ServerChannel:
    """Channel to one server: it sends requests within limits and repeats them through outages."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float, transport: Transport | None = None
    ) -> None:
        self.config = config
        self.limits: dict[Split, Limit] = {
            "train": Limit(config.num_max_requests_at_once),
            "eval": Limit(config.num_requests_for_eval),
        }
        self.timings: dict[Split, Timings] = {
            "train": Timings(config.rolling_buffer_length),
            "eval": Timings(config.rolling_buffer_length),
        }
        self._wait_timeout_seconds = wait_timeout_seconds
        self._transport = transport or HttpTransport(_headers(config), timeout_seconds=config.timeout)
        self._recovered: anyio.Event | None = None
        self._avoided_seconds = 0.0
        self._avoided_until = 0.0
        self._logs_requests = os.environ.get(DEBUG_REQUESTS) == "1"
        self.host_is_known = False
        """True once the server has answered, and from the start if it is a registered one: its name is right, so a
        lookup that fails is an outage."""

    @property
    def up(self) -> bool:
        """True if no outage of the server is known."""
        return self._recovered is None and self._avoided_seconds == 0

    @property
    def worth_trying(self) -> bool:
        """True if the server is up, or has been unavailable for so long that a request may try it again."""
        return self._recovered is None and time.monotonic() >= self._avoided_until

    async def post(
        self,
        url: str,
        body: bytes,
        split: Split,
        *,
        failover: Failover = None,
        on_piece: OnPiece | None = None,
    ) -> bytes:
        """Return the body of a successful answer; wait for an unavailable server, and raise errors that persist.

        Once a part of the answer was passed to `on_piece`, a broken connection is an error and the request is not
        repeated.
        """
        async with self.limits[split]:
            if self._avoided_seconds:
                self._avoid()  # this request tries the server; others avoid it until then
            call = _Call("POST", url, body, failover, on_piece)
            started = time.monotonic()
            with current_span().child("inference", url=url, split=split) as span:
                answer = await self._through_outages(call)
                span.set(attempts=call.attempts)
            self.timings[split].record(time.monotonic() - started, call.attempts)
            return answer

    async def get(self, url: str, *, failover: Failover = None) -> bytes | None:
        """Wait until the server answers, and return the body at `url`, or None if there is none."""
        try:
            return await self._through_outages(_Call("GET", url, None, failover))
        except InferenceRefused:
            return None

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _through_outages(self, call: _Call) -> bytes:
        while True:
            if self._recovered is not None:
                await self._wait_for_recovery(call, self._recovered)
                continue
            outcome = await self._attempt(call)
            if _is_final(outcome):
                return self._content_or_raise(outcome, call.url)
            self._fail_over_if_possible(call, outcome)
            if self._recovered is None:
                return await self._probe(call, outcome)

    async def _wait_for_recovery(self, call: _Call, recovered: anyio.Event) -> None:
        if call.failover is None:
            await recovered.wait()
            return
        with anyio.move_on_after(FAILOVER_CHECK_SECONDS):
            await recovered.wait()
            return
        self._fail_over_if_possible(call, None)

    def _fail_over_if_possible(self, call: _Call, outcome: Outcome | None) -> None:
        if call.may_fail_over and not (isinstance(outcome, Response) and outcome.status == 500):
            self._avoid()
            raise ServerUnavailable(f"{self.config.root_url} is unavailable")

    def _avoid(self) -> None:
        longer = max(FIRST_AVOIDED_SECONDS, self._avoided_seconds * 2)
        self._avoided_seconds = min(LONGEST_AVOIDED_SECONDS, longer)
        self._avoided_until = time.monotonic() + self._avoided_seconds

    async def _probe(self, call: _Call, outcome: Outcome) -> bytes:
        """Repeat this request until the server answers it; all other requests wait for the outcome."""
        recovered = self._recovered = anyio.Event()
        try:
            return self._content_or_raise(await self._repeat(call, outcome), call.url)
        finally:
            self._recovered = None
            recovered.set()

    async def _repeat(self, call: _Call, outcome: Outcome) -> Outcome:
        wait = Wait(self._wait_timeout_seconds)
        server_errors = 0
        delay = FIRST_DELAY_SECONDS
        while True:
            server_errors += not isinstance(outcome, OSError) and outcome.status == 500
            if not self._should_retry(outcome, server_errors) or wait.is_over:
                return outcome
            if wait.has_line():
                logger.info("waiting for %s (%.0f s): %s", self.config.root_url, wait.seconds, _describe(outcome))
            await anyio.sleep(delay)
            delay = min(LONGEST_DELAY_SECONDS, delay * 1.5)
            self._fail_over_if_possible(call, outcome)
            outcome = await self._attempt(call)
            if _is_final(outcome):
                return outcome

    def _should_retry(self, outcome: Outcome, server_errors: int) -> bool:
        error = outcome if isinstance(outcome, OSError) else None
        unknown_host = find_host_error(error, answered=self.host_is_known) is not None
        return self.config.health_check and not unknown_host and server_errors < SERVER_ERROR_ATTEMPTS

    def _content_or_raise(self, outcome: Outcome, url: str) -> bytes:
        if isinstance(outcome, OSError):
            raise self._unreachable(outcome) from outcome
        if outcome.is_success:
            return outcome.content
        reason = f"{url} answered {_describe(outcome)}"
        if outcome.status in RETRIED_STATUSES and outcome.status != 500:
            raise InferenceUnavailable(f"{reason}; is the inference server healthy?")
        raise InferenceRefused(reason)

    def _unreachable(self, error: OSError) -> InferenceHostUnknown | InferenceUnavailable:
        url = self.config.base_url
        if (unknown := find_host_error(error, answered=self.host_is_known)) is not None:
            return InferenceHostUnknown(f"the host of {url} cannot be resolved ({unknown}); check --openai.base_url")
        return InferenceUnavailable(
            f"no inference server answers at {url} ({type(error).__name__} {error}); start it or set --openai.base_url"
        )

    async def _send(self, call: _Call) -> Response:
        on_piece = call.on_piece
        if on_piece is None:
            return await self._transport.request(call.method, call.url, call.body)

        def forward(part: bytes) -> None:
            call.streamed = True
            on_piece(part)

        return await self._transport.request(call.method, call.url, call.body, on_piece=forward)

    async def _attempt(self, call: _Call) -> Outcome:
        call.attempts += 1
        if self._logs_requests:
            logger.info("request %s %s %s", call.method, call.url, (call.body or b"").decode("utf-8", "replace"))
        try:
            outcome = await self._send(call)
        except OSError as error:  # a timeout is an OSError, too
            if call.streamed:
                raise InferenceAborted(f"the answer of {call.url} ended early: {_describe(error)}") from error
            return error
        self.host_is_known = True
        if outcome.status not in RETRIED_STATUSES:
            self._avoided_seconds = self._avoided_until = 0.0
        return outcome


def _headers(config: APIServerConfig) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if config.api_key:
        headers["Authorization"] = f"Bearer {config.api_key}"
    return headers


def _is_final(outcome: Outcome) -> bool:
    return not isinstance(outcome, OSError) and outcome.status not in RETRIED_STATUSES


def _describe(outcome: Outcome) -> str:
    if isinstance(outcome, OSError):
        return f"{type(outcome).__name__} {outcome}".rstrip()
    try:
        problem = msgspec.json.decode(outcome.content, type=dict[str, Any])
        detail = problem.get("detail") or problem.get("error") or problem
    except msgspec.DecodeError:
        detail = outcome.content[:300].decode("utf-8", "replace")
    return f"{outcome.status}: {detail}"
