"""Several inference servers as one: requests go to the least loaded healthy one, and many samples are split up."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import RequestRefused
from environments.sdk.inference.retries import ServerUnavailable
from environments.sdk.inference.sampling import Failover, OnTokens, PromptLogprobs, Sample, Sampling, Split, count_of
from environments.sdk.inference.server import HttpServer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ServerPool:
    """The servers of an environment: a request goes to another one if its server is unavailable."""

    def __init__(self, servers: list[HttpServer], *, max_n_completions: int, wait_timeout_seconds: float) -> None:
        self.servers = servers
        self.max_n_completions = max_n_completions
        self._wait_timeout_seconds = wait_timeout_seconds

    def least_loaded(self, avoid: Sequence[HttpServer] = ()) -> HttpServer:
        """Return the server with the fewest requests among those worth trying; among all if there are none."""
        usable = [server for server in self.servers if server.channel.worth_trying and server not in avoid]
        return min(usable or self.servers, key=lambda server: server.in_flight)

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

    def single(self) -> ServerPool:
        """Return a pool of the least loaded server alone."""
        return self._only(self.least_loaded())

    def _only(self, server: HttpServer) -> ServerPool:
        return ServerPool(
            [server],
            max_n_completions=self.max_n_completions,
            wait_timeout_seconds=self._wait_timeout_seconds,
        )

    async def ask(
        self, server: HttpServer, call: Callable[[HttpServer, Failover], Awaitable[T]]
    ) -> tuple[HttpServer, T]:
        """Run `call` on `server`, or on another if it is unavailable; return the server used and the result."""
        deadline = time.monotonic() + self._wait_timeout_seconds
        avoided: list[HttpServer] = []
        while True:
            no_failover = len(self.servers) == 1 or time.monotonic() > deadline
            server.in_flight += 1
            try:
                return server, await call(server, None if no_failover else self._failover(server))
            except ServerUnavailable:
                avoided.append(server)
                logger.debug("%s is unavailable; the request goes to another server", server.config.root_url)
            finally:
                server.in_flight -= 1
            server = self.least_loaded(avoided)

    def _failover(self, server: HttpServer) -> Failover:
        return lambda: any(other is not server and other.channel.up for other in self.servers)

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

    The server is chosen at the first request, since a rollout may do much else before it.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._chosen: HttpServer | None = None

    @property
    def config(self) -> APIServerConfig:
        return self._server.config

    @property
    def _server(self) -> HttpServer:
        if self._chosen is None:
            self._chosen = self._pool.least_loaded()
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
            on_part_tokens = _from_number(on_tokens, first)
            self._chosen, found = await self._pool.ask(
                self._server,
                lambda server, failover: server.generate(
                    prompt_tokens, part, split, failover=failover, on_tokens=on_part_tokens
                ),
            )
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


def _from_number(on_tokens: OnTokens | None, first: int) -> OnTokens | None:
    """Return `on_tokens` for a request whose samples begin at number `first`."""
    if on_tokens is None or not first:
        return on_tokens
    return lambda index, tokens, logprobs: on_tokens(first + index, tokens, logprobs)


def _sizes(n: int, most: int) -> list[int]:
    return [min(most, n - start) for start in range(0, n, most)]


async def _gather(ask: Callable[[int], Awaitable[list[T]]], sizes: list[int]) -> list[T]:
    parts: list[list[T]] = [[] for _ in sizes]

    async def fill(index: int) -> None:
        parts[index] = await ask(sizes[index])

    async with anyio.create_task_group() as group:
        for index in range(len(sizes)):
            group.start_soon(fill, index)
    return [found for part in parts for found in part]


def _sum_usage(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Return the summed usage; the prompt counts as often as it was sent."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(int((answer.get("usage") or {}).get(name) or 0) for answer in answers) for name in names}
