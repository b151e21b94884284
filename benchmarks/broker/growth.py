"""Measures the cost of a long queue: status polls, the first batch, memory."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from benchmarks.broker.client import Client, Line, new_key
from benchmarks.broker.drivers import ENVIRONMENTS, JSON, register_legacy
from benchmarks.broker.servers import Server
from benchmarks.broker.workload import SentGroup, Shape, compare, make_groups

SMALL = Shape(4, 64, groups_per_batch=4)
LARGE = Shape(8, 2048, groups_per_batch=8)
DISTINCT = 100
PER_LIST = 100
POLLS = 500
SETTLE_SECONDS = 3.0
"""Pause after filling, so that the writing to disk is over before the queue is measured."""
LATER_BATCHES = 20


class Resident(NamedTuple):
    """Bytes of memory per queued group, and bytes of its JSON."""

    bytes_per_group: float
    json_bytes: float


class Polls(NamedTuple):
    """Milliseconds per poll: the caller's wait, and the server's CPU time."""

    wait_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Queued:
    """Times of one server with a number of groups queued, in milliseconds."""

    groups: int
    status_env_ms: float
    status_env_cpu_ms: float
    first_batch_ms: float
    later_batch_ms: float


def measure_queue(server: Server, queued: int) -> Queued:
    """Queue small groups, then time polls and batches; the first batch meets the full queue."""
    client = Client(server.port)
    env_ids = register_legacy(client, SMALL)
    sent = make_groups(SMALL, DISTINCT, environments=ENVIRONMENTS)
    _fill_with_lists(client, sent, queued)
    time.sleep(SETTLE_SECONDS)
    polls = measure_polls(server, env_ids[0])
    with Line(server.port) as line:
        first_ms, body = line.time("GET", "/batch")
        batch = orjson.loads(body)["batch"]
        marks = {item["tokens"][0][0] for item in batch}
        compare([group for group in sent if group.mark in marks], batch)
        later = [line.time("GET", "/batch")[0] for _ in range(LATER_BATCHES)]
    return Queued(queued, polls.wait_ms, polls.cpu_ms, first_ms, statistics.median(later))


def measure_polls(server: Server, env_id: int = 0) -> Polls:
    """Measure one environment's status poll, over many on one connection; an echo server returns the request itself."""
    question = json.dumps({"env_id": env_id}).encode()
    with Line(server.port) as line:
        cpu_before = server.cpu_seconds()
        waits = [line.time("GET", "/status-env", question)[0] for _ in range(POLLS)]
        cpu_ms = 1e3 * (server.cpu_seconds() - cpu_before) / POLLS
    return Polls(statistics.median(waits), cpu_ms)


def measure_memory(server: Server, shape: Shape, count: int, *, keyed: bool = True) -> Resident:
    """Measure the resident memory of each of `count` groups that were submitted one by one and are queued."""
    client = Client(server.port)
    register_legacy(client, shape)
    sent = make_groups(shape, ENVIRONMENTS, environments=ENVIRONMENTS)
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        _submit(client, sent, ENVIRONMENTS * 4, pool, keyed=keyed)
        before = server.resident_bytes()
        _submit(client, sent, count, pool, keyed=keyed)
        grown = server.resident_bytes() - before
    return Resident(grown / count, statistics.mean(len(group.text) for group in sent))


def _submit(client: Client, sent: Sequence[SentGroup], count: int, pool: ThreadPoolExecutor, *, keyed: bool) -> None:
    def submit(index: int) -> None:
        headers = {"idempotency_key": new_key()} if keyed else {}
        client.request("POST", "/scored_data", sent[index % len(sent)].text, content_type=JSON, **headers)

    list(pool.map(submit, range(count)))


def _fill_with_lists(client: Client, sent: Sequence[SentGroup], count: int) -> None:
    for start in range(0, count, PER_LIST):
        texts = [sent[index % len(sent)].text for index in range(start, min(count, start + PER_LIST))]
        body = b"[%b]" % b",".join(texts)
        client.request("POST", "/scored_data_list", body, content_type=JSON, idempotency_key=new_key())
