"""A thousand environments, each on a connection of its own, that poll while groups come and batches go."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import uvloop

from benchmarks.broker.client import Client, new_key
from benchmarks.broker.drivers import JSON, register_legacy
from benchmarks.broker.servers import Server
from benchmarks.broker.workload import Shape, make_groups

SHAPE = Shape(8, 512, groups_per_batch=8)
PERIOD_SECONDS = 1.0
"""Time between two polls of one environment."""
BATCHES_PER_SECOND = 2


@dataclass(frozen=True)
class Crowd:
    """The latency of polls, and the share of a CPU that the server's process used meanwhile."""

    environments: int
    polls: int
    p50_ms: float
    p99_ms: float
    cpu_fraction: float


def measure_crowd(server: Server, environments: int, seconds: float) -> Crowd:
    """Measure polls of many environments, while a trainer takes two batches a second and groups arrive as fast."""
    client = Client(server.port)
    env_ids = register_legacy(client, SHAPE, environments)
    cpu_before, began = server.cpu_seconds(), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(_produce_and_train, client, began + seconds)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            latencies = runner.run(_poll_all(server.port, env_ids, seconds))
        work.result()
    cpu = server.cpu_seconds() - cpu_before
    quantiles = statistics.quantiles(latencies, n=100)
    return Crowd(
        environments, len(latencies), 1e3 * quantiles[49], 1e3 * quantiles[98], cpu / (time.monotonic() - began)
    )


def _produce_and_train(client: Client, until: float) -> None:
    sent = make_groups(SHAPE, SHAPE.groups_per_batch, environments=8)
    while time.monotonic() < until:
        for group in sent:
            client.request("POST", "/scored_data", group.text, content_type=JSON, idempotency_key=new_key())
        client.request("GET", "/batch")
        time.sleep(1 / BATCHES_PER_SECOND)


async def _poll_all(port: int, env_ids: list[int], seconds: float) -> list[float]:
    latencies: list[float] = []
    until = time.monotonic() + seconds
    starts = (PERIOD_SECONDS * index / len(env_ids) for index in range(len(env_ids)))
    await asyncio.gather(
        *(_poll(port, env_id, start, until, latencies) for env_id, start in zip(env_ids, starts, strict=True))
    )
    return latencies


async def _poll(port: int, env_id: int, first_in: float, until: float, latencies: list[float]) -> None:
    await asyncio.sleep(first_in)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"env_id": env_id}).encode()
    head = f"GET /status-env HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    while time.monotonic() < until:
        began = time.perf_counter()
        writer.write(request)
        answer = await reader.readuntil(b"}")
        latencies.append(time.perf_counter() - began)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a poll was answered {answer[:200]!r}")
        await asyncio.sleep(PERIOD_SECONDS)
    writer.close()
