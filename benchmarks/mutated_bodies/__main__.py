"""Sends mutated bodies to every submit route of a broker, while a trainer and two environments work on it.

    python benchmarks/mutated_bodies --count 10000

The broker is a process of its own with the durable default store. Each round has a period in which trainer and
environments are alone, one beside well-formed bodies, and one beside mutants at the same rate. Printed are the answers
by status, the groups of these neighbours that were lost or altered, the ratios of their p99, and the broker's memory.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import neighbours
import psutil
import sending
from sending import Bodies, Stretch

from atropos_api.client import BrokerClient
from atropos_api.client.calls import Calls
from atropos_api.wire import EnvironmentRequest, Group
from atropos_api.wire.groups import WIRE_KEYS

SETTLE_SECONDS = 2.0

Stretches = list[Stretch]


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory() as store, broker(store) as (url, process):
        figures = measure(url, psutil.Process(process.pid), options)
        figures["broker still alive"] = process.poll() is None
    print(json.dumps(figures, indent=None if options.json else 2))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutants to send")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures in one line")
    return parser.parse_args()


def measure(url: str, broker_process: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    with BrokerClient(url) as client:
        beside = neighbours.Neighbours(url)
        request = EnvironmentRequest(name="mutants", group_size=neighbours.GROUP_SIZE, max_token_length=999)
        bodies = make_bodies(client.register_environment(request).environment_id, random.Random(options.seed))
    answers: collections.Counter[str] = collections.Counter()
    stretches: dict[str, Stretches] = {"alone": [], "beside well-formed bodies": [], "beside mutants": []}
    resident = [broker_process.memory_info().rss]
    with sending.Sender(url, bodies, rate=options.rate, seed=options.seed) as sender:
        for _ in range(options.rounds):
            lot = options.count // options.rounds
            stretches["alone"].append(timed(lambda: time.sleep(lot / options.rate / 3)))  # noqa: B023
            stretches["beside well-formed bodies"].append(sender.send(lot // 3, mutate=False)[0])
            stretch, counted = sender.send(lot, mutate=True)
            stretches["beside mutants"].append(stretch)
            answers.update(counted)
            resident.append(broker_process.memory_info().rss)
    time.sleep(SETTLE_SECONDS)
    resident.append(broker_process.memory_info().rss)
    beside.stop()
    return summarise(answers, beside, stretches, resident)


def summarise(
    answers: collections.Counter[str],
    beside: neighbours.Neighbours,
    stretches: dict[str, Stretches],
    resident: list[int],
) -> dict[str, Any]:
    p99 = {name: beside.p99(when) for name, when in stretches.items()}
    return {
        "mutants": answers.total(),
        "answers by kind and status": dict(sorted(answers.items())),
        "server errors": sum(count for what, count in answers.items() if what.rpartition(" ")[2].startswith("5")),
        "silences": sum(count for what, count in answers.items() if what.endswith(" silence")),
        "neighbours' groups": len(beside.sent),
        "lost": beside.lost(),
        "altered": beside.altered(),
        "failures": beside.failures,
        "p99 beside well-formed bodies, as a multiple of alone": p99["beside well-formed bodies"] / p99["alone"],
        "p99 beside mutants, as a multiple of alone": p99["beside mutants"] / p99["alone"],
        "resident MiB before, after each round, at the end": [round(size / 2**20, 1) for size in resident],
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    began = time.monotonic()
    work()
    return began, time.monotonic()


def make_bodies(environment_id: int, rng: random.Random) -> Bodies:
    """Make well-formed bodies as real clients send them, for every route that takes groups."""
    groups = [neighbours.make_group(rng, length) for length in (5, 40, 40, 300)]
    bodies: Bodies = []
    for index, group in enumerate(groups):
        item = as_legacy(group, environment_id)
        bodies.append(("/scored_data", json.dumps(item).encode(), {}))
        bodies.append(
            ("/scored_data_list", json.dumps([item, as_legacy(groups[index - 1], environment_id)]).encode(), {})
        )
        submission = {"environment_id": environment_id, "groups": [item]}
        bodies.append(("/v1/groups", json.dumps(submission).encode(), {"Idempotency-Key": f"mutant {index}"}))
        call = Calls().submit(environment_id, [group], idempotency_key=f"columns {index}")
        bodies.append((call.path, call.content or b"", call.headers))
    return bodies


def as_legacy(group: Group, environment_id: int) -> dict[str, Any]:
    item = {key: getattr(group, key) for key in WIRE_KEYS}
    return item | {"env_id": environment_id, "advantages": [], "generation_params": {"temperature": 0.8}}


@contextmanager
def broker(store: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a broker on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "atropos_api", "--port", str(port), "--store", store, "--log-level", "critical"]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            with BrokerClient(url) as client:
                client.wait_until_ready(30)
            yield url, process
        finally:
            process.terminate()
            process.wait(15)


if __name__ == "__main__":
    sys.exit(main())
