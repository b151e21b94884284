"""Hours of inference servers that come and go, in seconds: the real pool answers each request once and soon.

The event loop's time is simulated: where nothing is ready, it goes on to the next timer at once. What happens depends
on the seed alone; rules with a planted bug break a promise. Seed 1 found a request that went back to the server that
had just failed, again and again, while others were up; seed 2 found that all waited for servers that were out while one
that was up again was not tried.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.inference import retries
from environments.sdk.inference.http_transport import Response
from environments.sdk.inference.pool import ServerPool
from environments.sdk.inference.retries import ServerChannel
from environments.sdk.server_manager import ServerManager

from .oracle import PromiseBroken
from .simulated_loop import SimulatedLoop

REQUESTS = int(os.environ.get("ATROPOS_SIMULATION_EVENTS", "100000")) // 10
NAMES = ("one", "two", "three")
CLIENTS = 12
LONGEST_ANSWER_SECONDS = 2.0
MOST_ATTEMPTS = 1.5
MOST_WAIT_SECONDS = 10.0
"""Time after which a request must have been answered if a server was up all the time."""
MOST_IDLE_SECONDS = 10.0
"""Time after which a server that is up again must have been tried: it is avoided for five seconds at most."""


@dataclass
class Farm:
    """A transport to servers that refuse, answer 503, lose answers or are slow at times."""

    chance: random.Random
    out: dict[str, str] = field(default_factory=dict)
    """Servers that are out, with how it shows."""
    all_out_since: float | None = None
    seconds_all_out: float = 0.0
    given: list[tuple[str, int]] = field(default_factory=list)
    """Server and number of each answer that was sent."""
    attempts: int = 0
    up_since: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    asked_at: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))

    async def request(self, method: str, url: str, body: bytes | None, *, on_piece: Any = None) -> Response:
        name, number = url.split("/")[2], int(body or b"0")
        self.attempts += 1
        self.asked_at[name] = time.monotonic()
        await anyio.sleep(self.chance.uniform(0.01, LONGEST_ANSWER_SECONDS if self.chance.random() < 0.1 else 0.2))
        how = self.out.get(name)
        if how == "refuses":
            raise ConnectionRefusedError(name)
        if how == "busy":
            return Response(503, b"")
        if how == "loses" or self.chance.random() < 0.01:
            raise ConnectionResetError(name)
        self.given.append((name, number))
        return Response(200, b"%d" % number)

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    async def come_and_go(self, name: str) -> None:
        """Take a server out again and again."""
        while True:
            await anyio.sleep(self.chance.expovariate(1 / 30.0))
            self.out[name] = self.chance.choice(("refuses", "busy", "loses"))
            if len(self.out) == len(NAMES):
                self.all_out_since = time.monotonic()
            await anyio.sleep(self.chance.expovariate(1 / 20.0))
            if self.all_out_since is not None:
                self.seconds_all_out += time.monotonic() - self.all_out_since
                self.all_out_since = None
            del self.out[name]
            self.up_since[name] = time.monotonic()

    def idle(self) -> list[str]:
        """Return the servers that have been up again for long, and are not asked."""
        long_ago = time.monotonic() - MOST_IDLE_SECONDS
        up = [name for name in NAMES if name not in self.out]
        return [name for name in up if self.asked_at[name] < self.up_since[name] < long_ago]

    def seconds_out(self) -> float:
        """Return for how long no server has been up so far."""
        return self.seconds_all_out + (time.monotonic() - self.all_out_since if self.all_out_since is not None else 0.0)


@dataclass
class Clients:
    """Those who ask: each request is a number, which its answer repeats."""

    pool: ServerPool
    farm: Farm
    answered: int = 0
    next_number: int = 1

    async def ask(self, requests: int) -> None:
        chance, server = self.farm.chance, None
        while self.next_number <= requests:
            number, self.next_number = self.next_number, self.next_number + 1
            began, out_before = time.monotonic(), self.farm.seconds_out()
            server, answer = await self.pool.ask(
                None if chance.random() < 0.5 else server,  # as a session that keeps its server
                lambda server, failover, number=number: server.channel.post(
                    f"{server.config.root_url}/x", b"%d" % number, "train", failover=failover
                ),
            )
            waited = time.monotonic() - began - (self.farm.seconds_out() - out_before)
            if int(answer) != number or (server.config.root_url.split("/")[2], number) not in self.farm.given[-50:]:
                raise PromiseBroken(f"request {number} got the answer {answer!r} of {server.config.root_url}")
            if idle := self.farm.idle():
                raise PromiseBroken(f"{idle} are up and not asked")
            if waited > MOST_WAIT_SECONDS:
                raise PromiseBroken(f"request {number} waited {waited:.1f} s while a server was up")
            self.answered += 1
            await anyio.sleep(chance.expovariate(1.0))


async def _simulate(seed: int, requests: int) -> tuple[Farm, Clients]:
    farm = Farm(random.Random(seed))
    configs = [APIServerConfig(server_type="vllm", base_url=f"http://{name}/v1") for name in NAMES]
    manager = ServerManager(configs, load_tokenizer=lambda: None, transport=farm, wait_timeout_seconds=3600.0)  # type: ignore[arg-type]
    clients = Clients(manager.pool, farm)
    async with anyio.create_task_group() as outages:
        for name in NAMES:
            outages.start_soon(farm.come_and_go, name)
        async with anyio.create_task_group() as asking:
            for _ in range(CLIENTS):
                asking.start_soon(clients.ask, requests)
        outages.cancel_scope.cancel()
    return farm, clients


def simulate(patch: pytest.MonkeyPatch, seed: int, requests: int) -> tuple[Farm, Clients]:
    with patch.context() as simulated, asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        simulated.setattr(time, "monotonic", runner.get_loop().time)
        return runner.run(_simulate(seed, requests))


def check(farm: Farm, clients: Clients) -> None:
    if len(farm.given) != clients.answered:
        raise PromiseBroken("an answer that was given was asked for again")
    if farm.attempts > MOST_ATTEMPTS * clients.answered:
        raise PromiseBroken(f"{farm.attempts} attempts for {clients.answered} requests: many ask servers that are out")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_request_is_answered_once_by_a_server_that_is_up(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    farm, clients = simulate(monkeypatch, seed, REQUESTS)
    check(farm, clients)
    assert clients.answered == REQUESTS
    assert farm.seconds_all_out > 0


def ask_twice(patch: pytest.MonkeyPatch) -> None:
    post = ServerChannel.post

    async def again(self: ServerChannel, *arguments: Any, **named: Any) -> bytes:
        await post(self, *arguments, **named)
        return await post(self, *arguments, **named)

    patch.setattr(ServerChannel, "post", again)


def answer_another(patch: pytest.MonkeyPatch) -> None:
    request = Farm.request

    async def late(self: Farm, method: str, url: str, body: bytes | None, **named: Any) -> Response:
        answer = await request(self, method, url, body, **named)
        self.kept, answer = answer, getattr(self, "kept", answer)  # type: ignore[attr-defined]
        return answer

    patch.setattr(Farm, "request", late)


def avoid_for_an_hour(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retries, "FIRST_AVOIDED_SECONDS", 3600.0)
    patch.setattr(retries, "LONGEST_AVOIDED_SECONDS", 3600.0)


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a request stays with the server that is out": lambda patch: patch.setattr(
        ServerPool, "_failover", lambda *_: None
    ),
    "a server that is up again is left aside for an hour": avoid_for_an_hour,
    "a request is asked twice": ask_twice,
    "an answer is another request's": answer_another,
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_of_the_pool_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as planted:
        PLANTS[bug](planted)
        with pytest.raises((PromiseBroken, ExceptionGroup)) as found:
            check(*simulate(monkeypatch, 4, 10_000))
    assert isinstance(found.value, PromiseBroken) or found.group_contains(PromiseBroken)
