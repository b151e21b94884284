"""The cost of being watched: `python -m benchmarks.broker.watching`.

One broker takes groups and hands out batches as fast as one caller can. It works in four ways in turn: alone; with the
reports that a trainer and eight environments send for the page, each once a second; with the reports and one reader of
its event stream (all tabs of a browser share one); with the reports and twenty readers. Each round has all four ways
and begins with another one. It prints the broker's CPU time for each group, and how many groups a second went through
it, as ratios to another way in the same round: the median over the rounds, and their quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atropos_api.client import BrokerClient
from atropos_api.client.calls import Calls
from atropos_api.wire import EnvironmentRequest, Group, RunInfo, RunRequest
from atropos_api.wire.reports import (
    EnvironmentActivity,
    GroupValues,
    OpenRollout,
    RunReport,
    SampleValues,
    ServerUse,
    StepMetrics,
    TokenReport,
    TrainerActivity,
)
from benchmarks.broker import servers
from benchmarks.broker.workload import Shape, make_groups

SHAPE = Shape(8, 2048, groups_per_batch=8)
ENVIRONMENTS = 8
REPORT_SECONDS = 1.0
STEP_METRICS = 80
REPORTED_GROUPS = 2
"""Groups of which the trainer reports the tokens: about 16,384 by default (`--recorded-tokens`)."""

WAYS = (("left alone", False, 0), ("with reports", True, 0), ("and one reader", True, 1), ("and 20 readers", True, 20))
"""Each way by its name, with reports or without, and the number of readers."""


@dataclass
class Run:
    """A run at the broker under test, and the groups that are sent to it again and again."""

    client: BrokerClient
    server: servers.Server
    groups: list[Group]
    info: RunInfo
    environments: list[int]
    batch: int = 0
    reported_at: float = 0.0
    keys: Iterator[int] = field(default_factory=itertools.count)

    def pass_through(self, seconds: float, *, reports: bool) -> tuple[float, float]:
        """Submit, take and commit batches for some seconds; return CPU milliseconds a group, and groups a second."""
        cpu_before, began, first = self.server.cpu_seconds(), time.perf_counter(), self.batch
        while time.perf_counter() - began < seconds:
            self.batch += 1
            for index in range(SHAPE.groups_per_batch):
                key = next(self.keys)
                group = self.groups[key % len(self.groups)]
                self.client.submit(self.environments[index], [group], idempotency_key=str(key))
            self.client.get_batch(self.batch, run_id=self.info.run_id, epoch=self.info.epoch)
            if reports and time.perf_counter() - self.reported_at >= REPORT_SECONDS:
                self.reported_at = time.perf_counter()
                self.report()
            self.client.commit(self.batch, run_id=self.info.run_id, epoch=self.info.epoch)
        count = (self.batch - first) * SHAPE.groups_per_batch
        cpu = self.server.cpu_seconds() - cpu_before
        return 1000 * cpu / count, count / (time.perf_counter() - began)

    def report(self) -> None:
        """Send for one step what a trainer and the environments send."""
        values = {f"metric/{index}": index / 7 for index in range(STEP_METRICS)}
        step = StepMetrics(step=self.batch, time=time.time(), values=values)
        activity = TrainerActivity(step=self.batch, phases={"train": 1.0})
        self.client.report_run(self.info.run_id, RunReport(steps=[step], activity=activity))
        self.client.report_tokens(self.info.run_id, self.batch, token_report(self.groups))
        open_group = OpenRollout(name="What is 3 + 4?", seconds=2.0, done=5, wanted=8, last_event="request")
        use = ServerUse(url="http://127.0.0.1:9001", open_requests=8, requests=self.batch)
        report = EnvironmentActivity(open_rollouts=4, open_requests=8, slowest=[open_group] * 8, servers=[use])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port)) as connection:
            for environment in self.environments:
                call = Calls().report_activity(environment, report)
                connection.request(call.method, call.path, call.content, {"Content-Type": "application/json"})
                connection.getresponse().read()


def token_report(groups: list[Group]) -> TokenReport:
    positions = list(range(SHAPE.length // 4, SHAPE.length))
    numbers = [0.5] * len(positions)
    sample = SampleValues(positions=positions, advantages=numbers, logprobs=list(numbers), entropies=numbers)
    texts = {str(token): " the" for token in groups[0].tokens[0][:500]}
    each = [GroupValues(group=index, samples=[sample] * SHAPE.size) for index in range(REPORTED_GROUPS)]
    return TokenReport(groups=each, texts=texts)


@contextlib.contextmanager
def readers(port: int, count: int) -> Iterator[list[int]]:
    """Read the event stream `count` times, as pages do, while the block runs; yield the bytes that each has read."""
    read = [0] * count
    stop = threading.Event()

    def follow(index: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)) as connection:
            connection.request("GET", "/v1/events")
            response = connection.getresponse()
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    read[index] += len(response.read1(1 << 16))

    threads = [threading.Thread(target=follow, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield read
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)


def run(rounds: int, seconds: float) -> None:
    groups = [Group(**one.values) for one in make_groups(SHAPE, 32, environments=ENVIRONMENTS)]
    with (
        tempfile.TemporaryDirectory() as directory,
        servers.ours("store", Path(directory)) as server,
        BrokerClient(f"http://127.0.0.1:{server.port}") as client,
    ):
        info = client.begin_run(
            RunRequest(name="run", batch_size=SHAPE.batch_size, max_token_length=SHAPE.length, num_steps=0)
        )
        wanted = {"group_size": SHAPE.size, "max_token_length": SHAPE.length}
        names = (EnvironmentRequest(name=f"env {index}", **wanted) for index in range(ENVIRONMENTS))
        environments = [client.register_environment(one).environment_id for one in names]
        run = Run(client, server, groups, info, environments)
        run.pass_through(seconds, reports=True)
        cpu: list[list[float]] = [[] for _ in WAYS]
        rate: list[list[float]] = [[] for _ in WAYS]
        for number in range(rounds):
            for turn in range(len(WAYS)):
                way = (number + turn) % len(WAYS)
                _, reports, streams = WAYS[way]
                with readers(server.port, streams):
                    cpu_ms, per_second = run.pass_through(seconds, reports=reports)
                cpu[way].append(cpu_ms)
                rate[way].append(per_second)
        resident_mib = server.resident_bytes() / 2**20
    for base, ways in ((0, (1, 2, 3)), (1, (2, 3))):
        print(f"against {WAYS[base][0]}:")
        for way in ways:
            told = f"CPU {ratio(cpu[way], cpu[base])}  groups a second {ratio(rate[way], rate[base])}"
            print(f"  {WAYS[way][0]:14}  {told}")
    print(f"left alone, a group takes {statistics.median(cpu[0]):.2f} ms; resident at the end {resident_mib:.0f} MiB")


def ratio(values: list[float], base: list[float]) -> str:
    """Return the median of the rounds' ratios, with their quartiles."""
    low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in zip(values, base, strict=True)], n=4)
    return f"x{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=18, help="At least 2.")
    parser.add_argument("--seconds", type=float, default=2.0, help="Length of each part of a round.")
    options = parser.parse_args()
    run(options.rounds, options.seconds)


if __name__ == "__main__":
    main()
