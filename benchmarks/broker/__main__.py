"""Compares the broker with Atropos' own; one client drives them in turn: `python -m benchmarks.broker [--quick]`.

Prints the required, the desired and the measured figures. CPU is the time of the server's process, user and
kernel; the kernel's writing of dirty pages to the disk is not counted. Run it on an otherwise idle machine; only the
ratios carry over to another one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.broker import machine_baseline, servers
from benchmarks.broker.crowd import measure_crowd
from benchmarks.broker.cycle import Series, in_turn
from benchmarks.broker.drivers import ENVIRONMENTS, IN_COLUMNS, IN_JSON, Driver, Echo, Form, Legacy, Native
from benchmarks.broker.growth import LARGE, SMALL, measure_memory, measure_polls, measure_queue
from benchmarks.broker.peer import peer_python
from benchmarks.broker.registry import measure_registry
from benchmarks.broker.table import Row, compared, format_table
from benchmarks.broker.workload import Shape, make_groups

FEW = Shape(4, 64, groups_per_batch=16)


class BenchmarkRun:
    """The directory of one run, and its numbers of repetitions."""

    def __init__(self, directory: Path, python: Path, *, quick: bool) -> None:
        self._directory = directory
        self._python = python
        self._rounds = 3 if quick else 7
        self._quick = quick
        self._stores = 0

    def cycles(self) -> list[Row]:
        """Measure groups from submission to delivery, over the Atropos contract and in the forms of v1."""
        plain, *others = self._drive(
            LARGE,
            batches=2,
            ours=[_legacy, _native(IN_JSON, IN_JSON), _native(IN_COLUMNS, IN_COLUMNS), *_CROSSED, Echo],
        )
        legacy, native, columns, crossed_out, crossed_in, echo = others
        body_bytes = len(make_groups(LARGE, 1, environments=1)[0].text)
        zipped = self._drive(
            LARGE, batches=2, ours=[lambda server, shape: Legacy(server, shape, zipped=True)], zipped=True
        )
        few = self._drive(FEW, batches=8, ours=[_legacy, _native(IN_JSON, IN_JSON), Echo])
        return [
            _cpu_row("CPU per 8x2048 JSON group", legacy, plain, must=15, aim=25),
            _cpu_row("  the same, gzip both ways", zipped[1], zipped[0], must=12, aim=20),
            _cpu_row("  over v1, JSON", native, plain),
            _cpu_row("  binary columns, to its JSON", columns, plain, must=60, aim=100),
            _cpu_row("  JSON in, columns out", crossed_out, plain),
            _cpu_row("  columns in, JSON out", crossed_in, plain),
            _cpu_row("CPU per 4x64 JSON group", few[1], few[0], must=5, aim=10),
            _cpu_row("  over v1, JSON", few[2], few[0]),
            _baseline_row("8x2048 JSON: raw uvicorn echo", legacy, echo.median_cpu_ms),
            _baseline_row("4x64 JSON: raw uvicorn echo", few[1], few[3].median_cpu_ms),
            _baseline_row("8x2048 JSON: loopback TCP", legacy, machine_baseline.loopback_cpu_ms(body_bytes)),
            _baseline_row("8x2048 JSON: memcpy", legacy, machine_baseline.memcpy_ms(body_bytes)),
        ]

    def queue(self) -> list[Row]:
        many, more = (3_000, 10_000) if self._quick else (10_000, 100_000)
        with servers.reference(self._python, self._directory) as theirs:
            reference = measure_queue(theirs, many)
        with servers.ours(self._store(), self._directory) as ours:
            small = measure_queue(ours, many)
        with servers.ours(self._store(), self._directory) as ours:
            large = measure_queue(ours, more)
        with servers.echo(self._directory) as echo:
            bare = measure_polls(echo)
        return [
            compared(
                f"CPU per /status-env, {many:,} queued",
                small.status_env_cpu_ms,
                reference.status_env_cpu_ms,
                "ms",
                must=50,
            ),
            Row(
                "  raw uvicorn, as many bytes back",
                f"{small.status_env_cpu_ms:.4g} ms",
                f"{bare.cpu_ms:.4g} ms",
                bare.cpu_ms / small.status_env_cpu_ms,
            ),
            compared("  the caller's wait", small.status_env_ms, reference.status_env_ms, "ms", must=50),
            compared(f"first /batch, {many:,} queued", small.first_batch_ms, reference.first_batch_ms, "ms", must=500),
            Row(
                f"  under 8 ms, {many:,} queued",
                f"{small.first_batch_ms:.3g} ms",
                must="8 ms",
                met=small.first_batch_ms < 8,
            ),
            Row(
                f"  flat: {more:,} queued",
                f"{large.first_batch_ms:.3g} ms, later {large.later_batch_ms:.3g}",
                f"{many:,}: {small.first_batch_ms:.3g}, later {small.later_batch_ms:.3g}",
            ),
            Row(
                f"  /status-env, {more:,} queued",
                f"{large.status_env_ms:.3g} ms",
                f"{many:,}: {small.status_env_ms:.3g}",
            ),
        ]

    def memory(self) -> list[Row]:
        few, many = (100, 2_000) if self._quick else (300, 10_000)
        with servers.reference(self._python, self._directory) as theirs:
            reference = measure_memory(theirs, LARGE, few)
        with servers.ours(self._store(), self._directory) as ours:
            durable = measure_memory(ours, SMALL, many)
        with servers.ours("memory", self._directory) as ours:
            kept = measure_memory(ours, LARGE, few)
        fraction = kept.bytes_per_group / kept.json_bytes
        return [
            Row(
                "memory per queued group, durable",
                f"{durable.bytes_per_group:.0f} B",
                must="2048 B",
                met=durable.bytes_per_group <= 2048,
            ),
            Row(
                "memory store: memory to JSON",
                f"{fraction:.2f}",
                f"{reference.bytes_per_group / reference.json_bytes:.2f}",
                must="1.2",
                met=fraction <= 1.2,
            ),
        ]

    def crowd(self) -> list[Row]:
        environments, seconds = (200, 5) if self._quick else (1_000, 15)
        with servers.ours(self._store(), self._directory) as ours:
            crowd = measure_crowd(ours, environments, seconds)
        rate, busy = crowd.polls / seconds, 100 * crowd.cpu_fraction
        polling = f"{rate:.0f} polls/s, p50 {crowd.p50_ms:.2g} ms, {busy:.0f} % of a core"
        return [
            Row(
                f"{environments:,} environments polling, p99",
                f"{crowd.p99_ms:.3g} ms",
                must="50 ms",
                met=crowd.p99_ms < 50,
            ),
            Row("  " + polling, ""),
        ]

    def registry(self) -> list[Row]:
        count, seconds = (40, 15) if self._quick else (200, 60)
        with servers.ours(self._store(), self._directory) as ours:
            found = measure_registry(ours, count, 5 * count, seconds)
        return [
            Row(
                f"{count} inference servers, {5 * count:,} environments that follow them",
                f"{100 * found.cpu_fraction:.2g} % of a core",
                must="5 %",
                met=found.cpu_fraction < 0.05,
            ),
            Row(f"  {found.calls_per_second:.0f} calls/s; all know of one that left", f"{found.told_seconds:.2g} s"),
        ]

    def _drive(
        self, shape: Shape, *, batches: int, ours: list[Callable[[servers.Server, Shape], Driver]], zipped: bool = False
    ) -> list[Series]:
        """Drive the reference first, then each of ours on a broker of its own, in turn."""
        groups = make_groups(shape, 2 * shape.groups_per_batch, environments=ENVIRONMENTS)
        with ExitStack() as stack:
            theirs = stack.enter_context(servers.reference(self._python, self._directory))
            drivers: list[Driver] = [Legacy(theirs, shape, zipped=zipped)]
            for make in ours:
                server = servers.echo(self._directory) if make is Echo else servers.ours(self._store(), self._directory)
                drivers.append(make(stack.enter_context(server), shape))
            return in_turn(drivers, shape, groups, rounds=self._rounds, batches=batches)

    def _store(self) -> str:
        self._stores += 1
        return str(self._directory / f"store-{self._stores}")


def _legacy(server: servers.Server, shape: Shape) -> Driver:
    return Legacy(server, shape)


def _native(sent: Form, wanted: Form) -> Callable[[servers.Server, Shape], Driver]:
    return lambda server, shape: Native(server, shape, sent=sent, wanted=wanted)


_CROSSED = (_native(IN_JSON, IN_COLUMNS), _native(IN_COLUMNS, IN_JSON))


def _cpu_row(measure: str, ours: Series, reference: Series, *, must: float = 0, aim: float = 0) -> Row:
    ratio = ours.ratio_to(reference)
    return compared(measure, ours.median_cpu_ms, reference.median_cpu_ms, "ms", ratio=ratio, must=must, aim=aim)


def _baseline_row(measure: str, ours: Series, floor_ms: float) -> Row:
    return Row(measure, f"{ours.median_cpu_ms:.4g} ms", f"{floor_ms:.4g} ms", floor_ms / ours.median_cpu_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter queues: a look, not a result")
    parser.add_argument(
        "--only", choices=["cycles", "queue", "memory", "crowd", "registry"], nargs="+", help="some of the rows"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "atropos")
    arguments = parser.parse_args()
    python = peer_python(arguments.cache)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        run = BenchmarkRun(Path(directory), python, quick=arguments.quick)
        parts = {
            "cycles": run.cycles,
            "queue": run.queue,
            "memory": run.memory,
            "crowd": run.crowd,
            "registry": run.registry,
        }
        for name in arguments.only or parts:
            rows += parts[name]()
            print(f"{name} done", flush=True)
    print(format_table(rows))


if __name__ == "__main__":
    main()
