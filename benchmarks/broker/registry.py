"""Many inference servers that renew their leases, many environments that follow them, and a connection for each."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.broker.servers import Server

LEASE_SECONDS = 10.0
"""The default of --server-lease."""
RENEWED_SHARE = 0.4
"""The fraction of the lease after which our servers renew it."""
FOLLOW_SECONDS = 60.0


@dataclass(frozen=True)
class Registry:
    """The share of a CPU that the broker used, and the time until the last follower had a change."""

    servers: int
    followers: int
    cpu_fraction: float
    calls_per_second: float
    told_seconds: float


def measure_registry(
    server: Server, servers: int, followers: int, seconds: float, *, lease_seconds: float = LEASE_SECONDS
) -> Registry:
    """Measure while nothing changes but one server, which leaves in the middle."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Scene(server, servers, followers, lease_seconds).measure(seconds))


class _Scene:
    def __init__(self, broker: Server, servers: int, followers: int, lease_seconds: float) -> None:
        self._broker = broker
        self._servers = servers
        self._followers = followers
        self._lease_seconds = lease_seconds
        self._calls = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._sizes: dict[int, tuple[int, float]] = {}
        """By follower, the number of servers that it knows, and since when."""

    async def measure(self, seconds: float) -> Registry:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._serve(number)) for number in range(self._servers)]
            await asyncio.sleep(1.0)
            tasks += [group.create_task(self._follow(number)) for number in range(self._followers)]
            await asyncio.sleep(self._lease_seconds + 1.0)  # until every follower has the complete set
            cpu, calls, began = self._broker.cpu_seconds(), self._calls, time.monotonic()
            await asyncio.sleep(seconds / 2)
            tasks[0].cancel()
            left = time.monotonic()
            await self._call(await self._connect(), "DELETE", "/v1/servers/server-0")
            await asyncio.sleep(seconds / 2)
            spent, passed = self._broker.cpu_seconds() - cpu, time.monotonic() - began
            for task in tasks:
                task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        sizes, times = zip(*self._sizes.values(), strict=True)
        if set(sizes) != {self._servers - 1}:
            raise RuntimeError(f"followers know {set(sizes)} servers, there are {self._servers - 1}")
        rate = (self._calls - calls) / passed
        return Registry(self._servers, self._followers, spent / passed, rate, max(times) - left)

    async def _serve(self, number: int) -> None:
        """Renew as a server of fixed weights does, which needs no trainer."""
        connection = await self._connect()
        query = "wait=0"
        for renewals in itertools.count():
            report = {
                "lease_id": f"lease-{number:06}",
                "boot_id": f"boot-{number}",
                "mode": "fixed",
                "url": f"http://10.0.{number // 256}.{number % 256}:9001",
                "version": 1,
                "running": renewals % 7,
                "waiting": renewals % 3,
                "kv_free": 0.5,
            }
            await self._call(connection, "PUT", f"/v1/servers/server-{number}?{query}", json.dumps(report).encode())
            # Spread over the time between renewals, as those of servers that were started by hand.
            share = RENEWED_SHARE if renewals else RENEWED_SHARE * number / self._servers
            query = f"wait={share * self._lease_seconds}&state=serving"

    async def _follow(self, number: int) -> None:
        connection = await self._connect()
        epoch = -1
        while True:
            path = f"/v1/servers?policy=default&answering=true&since={epoch}&wait={FOLLOW_SECONDS}"
            found = gzip.decompress(await self._call(connection, "GET", path))
            # Decoding the whole set a thousand times would keep this process from renewing leases.
            epoch = int(found[: found.index(b",")].rpartition(b":")[2])
            count = found.count(b'"server_id"')
            if self._sizes.get(number, (None, 0.0))[0] != count:
                self._sizes[number] = (count, time.monotonic())

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._broker.port, limit=1 << 24)
        self._writers.append(writer)
        return reader, writer

    async def _call(
        self,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        method: str,
        path: str,
        content: bytes = b"",
    ) -> bytes:
        reader, writer = connection
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
        writer.write(head.encode() + b"Accept-Encoding: gzip\r\n\r\n" + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if not 200 <= int(lines[0].split()[1]) < 300:
            raise RuntimeError(f"{method} {path}: {lines[0].decode()}")
        self._calls += 1
        return await reader.readexactly(_length_of(lines))


def _length_of(lines: Sequence[bytes]) -> int:
    return next((int(line[16:]) for line in lines if line.lower().startswith(b"content-length: ")), 0)
