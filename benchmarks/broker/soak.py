"""A long run with a slow trainer: `python -m benchmarks.broker.soak --minutes 30`.

Eight environments offer groups at a steady rate and pause, as Atropos' own do, while enough is queued; the trainer
takes a batch now and then. Prints memory and disk use of each quarter of the run: they are bounded if the last is no
higher than those before. Every group delivered is compared with what was sent, and counted: none is lost or delivered
twice.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil

from benchmarks.broker import servers
from benchmarks.broker.client import Client, new_key
from benchmarks.broker.drivers import ENVIRONMENTS, JSON, register_legacy
from benchmarks.broker.workload import SentGroup, Shape, make_groups

SHAPE = Shape(8, 2048, groups_per_batch=8)
QUEUED_BATCHES = 3
SAMPLE_SECONDS = 2.0
MIB = 2**20


@dataclass
class Soak:
    """The state that the threads of one run share."""

    client: Client
    groups: list[SentGroup]
    until: float
    accepted: Counter[int] = field(default_factory=Counter)
    delivered: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def produce(self, env_id: int, groups_per_second: float) -> None:
        """Run one environment, which pauses on a full queue as Atropos' own do."""
        mine = self.groups[env_id::ENVIRONMENTS]
        place = 0
        while time.monotonic() < self.until:
            status = self.client.call("GET", "/status-env", {"env_id": env_id})
            if status["queue_size"] * SHAPE.size < QUEUED_BATCHES * SHAPE.batch_size:
                group = mine[place % len(mine)]
                self.client.request("POST", "/scored_data", group.text, content_type=JSON, idempotency_key=new_key())
                with self.lock:
                    self.accepted[group.mark] += 1
                place += 1
            time.sleep(ENVIRONMENTS / groups_per_second)

    def train(self, step_seconds: float) -> None:
        """Run the trainer until the environments have ended and the queue is empty."""
        while True:
            batch = orjson.loads(self.client.request("GET", "/batch").body)["batch"]
            if batch is None and time.monotonic() > self.until + SAMPLE_SECONDS:
                return
            for item in batch or ():
                self._check(item)
            time.sleep(step_seconds if time.monotonic() < self.until else 0.05)

    def _check(self, item: dict[str, list[list[int]]]) -> None:
        mark = item["tokens"][0][0]
        values = self.groups[mark].values
        if any(value != values.get(key) for key, value in item.items() if key != "received_version"):
            raise AssertionError(f"group {mark} was altered on its way")
        self.delivered[mark] += 1


def run(minutes: float, groups_per_second: float, step_seconds: float) -> None:
    groups = make_groups(SHAPE, 8 * ENVIRONMENTS, environments=ENVIRONMENTS)
    with tempfile.TemporaryDirectory() as directory, servers.ours("store", Path(directory)) as server:
        client = Client(server.port)
        env_ids = register_legacy(client, SHAPE)
        soak = Soak(client, groups, time.monotonic() + 60 * minutes)
        threads = [threading.Thread(target=soak.produce, args=(env_id, groups_per_second)) for env_id in env_ids]
        threads.append(threading.Thread(target=soak.train, args=(step_seconds,)))
        began, cpu_before = time.monotonic(), server.cpu_seconds()
        for thread in threads:
            thread.start()
        samples = _watch(server, Path(directory) / "store", soak.until)
        cpu_fraction = (server.cpu_seconds() - cpu_before) / (time.monotonic() - began)
        for thread in threads:
            thread.join()
        rest = _sample(server, Path(directory) / "store")
    _report(soak, samples, rest, minutes, cpu_fraction)


def _watch(server: servers.Server, store: Path, until: float) -> list[tuple[float, float, int]]:
    samples = []
    while time.monotonic() < until:
        samples.append(_sample(server, store))
        time.sleep(SAMPLE_SECONDS)
    return samples


def _sample(server: servers.Server, store: Path) -> tuple[float, float, int]:
    """Return resident MiB, MiB on disk, and open files."""
    disk = 0
    for path in store.rglob("*"):
        try:
            disk += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return server.resident_bytes() / MIB, disk / MIB, psutil.Process(server.pid).num_fds()


def _report(
    soak: Soak, samples: list[tuple[float, float, int]], rest: tuple[float, float, int], minutes: float, cpu: float
) -> None:
    sent, came = soak.accepted.total(), soak.delivered.total()
    lost = soak.accepted - soak.delivered
    twice = soak.delivered - soak.accepted
    print(f"{minutes:g} minutes, {sent} groups sent, {came} delivered, {100 * cpu:.0f} % of a core")
    # What does not fill a batch stays queued.
    print(f"not delivered: {lost.total()} (less than a batch of {SHAPE.groups_per_batch}), twice: {twice.total()}")
    for number, name in enumerate(("resident MiB", "disk MiB", "open files")):
        values = [sample[number] for sample in samples]
        quarter = max(1, len(values) // 4)
        peaks = [max(values[start : start + quarter]) for start in range(0, quarter * 4, quarter) if values[start:]]
        highest = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(f"{name:14} highest in each quarter: {highest}; after: {rest[number]:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--groups-per-second", type=float, default=150.0, help="offered by all environments together")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="from one batch to the next")
    arguments = parser.parse_args()
    run(arguments.minutes, arguments.groups_per_second, arguments.step_seconds)


if __name__ == "__main__":
    main()
