"""Several inference servers as one: requests go to the least loaded healthy one, and many samples are split up."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from atropos_api.common.concurrency import run_all
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceAborted, RequestRefused, innermost
from environments.sdk.inference.registered import RegisteredServers
from environments.sdk.inference.retries import ServerUnavailable
from environments.sdk.inference.sampling import Failover, OnTokens, PromptLogprobs, Sample, Sampling, Split, count_of
from environments.sdk.inference.server import HttpServer
from environments.sdk.progress import note_event

logger = logging.getLogger(__name__)

T = TypeVar("T")
ABORTED = "abort"
"""Finish reason of an answer that vLLM or SGLang cut off for a pause: its score would say nothing about the policy."""

MARGIN = 2
"""Requests in flight by which a registered server may exceed the least loaded one before related calls move there."""


@dataclass(eq=False)
class ServerPool:
    """The servers of an environment: a request goes to another one if its server is unavailable.

    Its servers are named, or come and go as `RegisteredServers` says.
    """

    servers: list[HttpServer]
    _: KW_ONLY
    max_n_completions: int
    wait_timeout_seconds: float
    registered: RegisteredServers | None = None

    def least_loaded(self, avoid: Sequence[HttpServer] = ()) -> HttpServer:
        """Return the server with the fewest requests among those worth trying, if possible none of `avoid`; among all
        if none is worth trying.
        """
        usable = [server for server in self.servers if server.channel.worth_trying]
        fresh = [server for server in usable if server not in avoid]
        return min(fresh or usable or self.servers, key=lambda server: server.in_flight)

    def sticky(self, base_url: str | None = None) -> StickyServer:
        """Return a server for related calls, which share a prefix cache: the named one, or the least loaded."""
        return StickyServer(self if base_url is None else self._only(self.named(base_url)))

    def named(self, base_url: str) -> HttpServer:
        """Return the server with this address."""
        for server in self.servers:
            if server.config.base_url.rstrip("/") == base_url.rstrip("/"):
                return server
        known = ", ".join(server.config.base_url for server in self.servers)
        raise RequestRefused(f"no server has the address {base_url}; there are {known}", param="base_url")

    async def single(self) -> ServerPool:
        """Return a pool of the least loaded server alone."""
        await self.wait_for_server()
        return self._only(self.least_loaded())

    def _only(self, server: HttpServer) -> ServerPool:
        return replace(self, servers=[server], registered=None)

    def pick(self, chosen: HttpServer | None) -> HttpServer | None:
        """Return the server for the next of several related calls; None while there is none.

        It is the `chosen` one while that is registered and has at most `MARGIN` requests more than another one: above
        that, waiting takes longer than computing the prompt again on the other.
        """
        if not self.servers:
            return None
        if chosen is None or chosen not in self.servers:
            return self.least_loaded()
        if self.registered is None:
            return chosen
        least = self.least_loaded()
        return least if chosen.in_flight > least.in_flight + MARGIN else chosen

    async def ask(
        self,
        server: HttpServer | None,
        call: Callable[[HttpServer, Failover], Awaitable[T]],
        *,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> tuple[HttpServer, T]:
        """Run `call` on `server`, or on another if it is unavailable or leaves; return the server used and the result.

        `may_repeat` returns False once a part of the answer was passed on.
        """
        deadline = time.monotonic() + self.wait_timeout_seconds
        avoided: list[HttpServer] = []
        while True:
            if server is None:
                await self.wait_for_server()
                server = self.least_loaded(avoided)
            is_alone = len(self.servers) == 1 and self.registered is None
            failover = None if is_alone or time.monotonic() > deadline else self._failover(server)
            note_event(f"request to {server.config.root_url}")
            try:
                with server.in_use(), server.presence() as left:
                    answer = await call(server, failover)
                    note_event(f"answer of {server.config.root_url}")
                    return server, answer
                if left.cancelled_caught and not may_repeat():
                    raise InferenceAborted(f"{server.config.root_url} left in the middle of its answer")
                logger.debug("%s left; the request goes to another server", server.config.root_url)
            except ServerUnavailable:
                logger.debug("%s is unavailable; the request goes to another server", server.config.root_url)
            avoided.append(server)
            server = self.least_loaded(avoided) if self.servers else None

    async def wait_for_server(self) -> None:
        """Return once there is a server; raise `InferenceUnavailable` after the time allowed."""
        if not self.servers and self.registered is not None:
            await self.registered.wait(self.wait_timeout_seconds)

    def _failover(self, server: HttpServer) -> Failover:
        """Return a test for another server worth trying, also one that was down: only a request shows if it is up."""
        return lambda: any(other is not server and other.channel.worth_trying for other in self.servers)

    async def split(self, config: APIServerConfig, n: int, ask: Callable[[int], Awaitable[list[T]]]) -> list[T]:
        """Collect `n` results, in order, from calls for at most the allowed number each; missing ones are requested
        again.

        A provider that returns fewer than requested ignores `n`; its config records that.
        """
        most = 1 if config.n_kwarg_is_ignored else self.max_n_completions
        found = await ask(n) if n <= most else await _gather(ask, _sizes(n, most))
        if len(found) < n:
            if not config.n_kwarg_is_ignored:
                config.n_kwarg_is_ignored = True
                logger.info("%s ignores n; samples are requested one by one", config.base_url)
            found += await _gather(ask, [1] * (n - len(found)))
        return found[:n]


class StickyServer:
    """A sticky server uses one server of a pool for as long as that one answers.

    The server is chosen at the first request, since a rollout may do much else before it. Every request has the whole
    prompt, so another server only has to compute it again.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._chosen: HttpServer | None = None

    @property
    def config(self) -> APIServerConfig:
        registered = self._pool.registered
        if registered is not None:
            return registered.template
        return (self._chosen or self._pool.least_loaded()).config

    @property
    def _server(self) -> HttpServer | None:
        self._chosen = self._pool.pick(self._chosen)
        return self._chosen

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        failover: Failover = None,  # noqa: ARG002 - the pool decides
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        asked = 0

        async def ask(n: int) -> list[Sample]:
            nonlocal asked
            first, part = asked, sampling.part(n, first=asked)
            asked += n
            passed_on = _Noted(_from_number(on_tokens, first))
            self._chosen, found = await self._pool.ask(
                self._server,
                lambda server, failover: server.generate(
                    prompt_tokens, part, split, failover=failover, on_tokens=passed_on if on_tokens else None
                ),
                may_repeat=lambda: not passed_on.any,
            )
            if any(sample.finish_reason == ABORTED for sample in found):
                raise InferenceAborted(f"{self._chosen.config.root_url} aborted its answer")
            return found

        return await self._pool.split(self.config, sampling.n, ask)

    async def prompt_logprobs(
        self,
        prompt_tokens: list[int],
        top_k: int,
        split: Split,
        *,
        failover: Failover = None,  # noqa: ARG002 - the pool decides
    ) -> PromptLogprobs:
        self._chosen, found = await self._pool.ask(
            self._server,
            lambda server, failover: server.prompt_logprobs(prompt_tokens, top_k, split, failover=failover),
        )
        return found

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]:
        """Return the server's own chat completion."""
        return await self._openai_form(
            kwargs, lambda fields: lambda server, failover: server.chat(messages, fields, split, failover=failover)
        )

    async def complete(self, prompt: str, kwargs: dict[str, Any], split: Split) -> dict[str, Any]:
        """Return the server's own text completion."""
        return await self._openai_form(
            kwargs, lambda fields: lambda server, failover: server.complete(prompt, fields, split, failover=failover)
        )

    async def _openai_form(
        self,
        kwargs: dict[str, Any],
        call: Callable[[dict[str, Any]], Callable[[HttpServer, Failover], Awaitable[dict[str, Any]]]],
    ) -> dict[str, Any]:
        """Return one answer with all choices, however many requests they took."""
        answers: list[dict[str, Any]] = []
        asked = 0

        async def ask(n: int) -> list[dict[str, Any]]:
            nonlocal asked
            fields = {**kwargs, "n": n} if "n" in kwargs else dict(kwargs)
            if asked and fields.get("seed") is not None:
                fields["seed"] += asked  # parts with the same seed would repeat each other's samples
            asked += n
            self._chosen, answer = await self._pool.ask(self._server, call(fields))
            answers.append(answer)
            return list(answer.get("choices") or [])

        choices = await self._pool.split(self.config, count_of(kwargs), ask)
        numbered = [{**choice, "index": index} for index, choice in enumerate(choices)]
        return {**answers[0], "choices": numbered, "usage": _sum_usage(answers)}


class _Noted:
    """`on_tokens`, with a note that tokens were passed on."""

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self._on_tokens = on_tokens
        self.any = False

    def __call__(self, index: int, tokens: list[int], logprobs: list[float]) -> None:
        self.any = True
        if self._on_tokens is not None:
            self._on_tokens(index, tokens, logprobs)


def _from_number(on_tokens: OnTokens | None, first: int) -> OnTokens | None:
    """Return `on_tokens` for a request whose samples begin at number `first`."""
    if on_tokens is None or not first:
        return on_tokens
    return lambda index, tokens, logprobs: on_tokens(first + index, tokens, logprobs)


def _sizes(n: int, most: int) -> list[int]:
    return [min(most, n - start) for start in range(0, n, most)]


async def _gather(ask: Callable[[int], Awaitable[list[T]]], sizes: list[int]) -> list[T]:
    """Return the results of one call for each size; raise an error as the call for all of them would."""
    try:
        parts = await run_all([partial(ask, size) for size in sizes])
    except ExceptionGroup as errors:
        raise innermost(errors) from errors
    return [found for part in parts for found in part]


def _sum_usage(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Return the summed usage; the prompt counts as often as it was sent."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(int((answer.get("usage") or {}).get(name) or 0) for answer in answers) for name in names}
