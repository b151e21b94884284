"""Half an hour of an inference server's registration, in seconds: its lease never ends because one renewal was lost.

The registration and the registry of the broker are the real ones; the event loop's time is simulated. Between them,
calls and answers are lost, but never two renewals in a row.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import anyio
import pytest

from atropos_api.broker.inference_servers import InferenceServers
from atropos_api.wire import ServerLease, ServerReport
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.registration import Load, Registration

from .simulated_loop import SimulatedLoop

LEASE_SECONDS = 10.0
MINUTES = 30


class LossyConnection:
    """The calls of a registration, of which one in four is lost: before it arrives, or its answer after it."""

    def __init__(self, chance: random.Random, servers: InferenceServers) -> None:
        self._chance = chance
        self._servers = servers
        self.lost = self.answered = 0
        self._may_lose = False

    async def renew_server(
        self, server_id: str, report: ServerReport, *, state: str | None = None, wait_seconds: float = 0.0
    ) -> ServerLease:
        loses = self._may_lose and self._chance.random() < 0.25
        self._may_lose = not loses
        if loses:
            self.lost += 1
            if self._chance.random() < 0.5:
                self._servers.renew(server_id, report, "127.0.0.1")
            await anyio.sleep_forever()
        await anyio.sleep(self._chance.uniform(0.0, 0.1))
        lease = self._servers.renew(server_id, report, "127.0.0.1")
        await anyio.sleep(wait_seconds if lease.state == state else 0.0)
        await anyio.sleep(self._chance.uniform(0.0, 0.1))
        self.answered += 1
        return lease

    async def remove_server(self, server_id: str, *, lease_id: str | None = None) -> None:
        self._servers.remove(server_id, lease_id)


async def _serve(seed: int) -> LossyConnection:
    """Serve for half an hour, and raise the refusal as soon as a request would get one."""
    clock: Callable[[], float] = asyncio.get_running_loop().time
    connection = LossyConnection(
        random.Random(seed), InferenceServers(clock, lease_seconds=LEASE_SECONDS, first_epoch=0)
    )
    config = ServerConfig.model_validate({"model": "m", "broker_url": "http://b:8000", "policy_version": 1})

    async def look() -> Load:
        return Load(version=1)

    server = Registration(connection, config.identify("boot", {}, encrypted=False), look, clock=clock)
    await server.renew()
    renewing = asyncio.ensure_future(server.run())
    ends = clock() + MINUTES * 60
    while clock() < ends:
        server.check()
        await anyio.sleep(0.05)
    renewing.cancel()
    return connection


@pytest.mark.parametrize("seed", [1, 2])
def test_a_server_never_stops_serving_because_one_renewal_was_lost(seed: int) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        connection = runner.run(_serve(seed))
    assert connection.lost > 50
