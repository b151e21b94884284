"""Groups from submission to delivery: the server's CPU time for each, and a comparison of every value."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.broker.client import Answer
from benchmarks.broker.drivers import ENVIRONMENTS, Driver, submit_all
from benchmarks.broker.workload import SentGroup, Shape, compare

OURS_MORE_OFTEN = 6
"""Repetitions of our part of a round, which takes a fraction of the reference's time."""


@dataclass
class Series:
    """One server's figures, one entry a round."""

    driver: Driver
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    @property
    def median_cpu_ms(self) -> float:
        return statistics.median(self.cpu_ms)

    def ratio_to(self, other: Series) -> float:
        """Return the median, over the rounds, of the other's CPU time divided by ours."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.cpu_ms, other.cpu_ms, strict=True))


def in_turn(
    drivers: Sequence[Driver], shape: Shape, groups: list[SentGroup], *, rounds: int, batches: int
) -> list[Series]:
    """Drive the servers one after the other, `rounds` times; the first is the reference."""
    series = [Series(driver) for driver in drivers]
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        for one in series:
            one.driver.prepare(groups)
            _run(one.driver, shape, groups, 2, pool)
        for _ in range(rounds):
            for index, one in enumerate(series):
                cpu_ms, wall_ms = _run(one.driver, shape, groups, batches * (OURS_MORE_OFTEN if index else 1), pool)
                one.cpu_ms.append(cpu_ms)
                one.wall_ms.append(wall_ms)
    return series


def _run(
    driver: Driver, shape: Shape, groups: list[SentGroup], batches: int, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """Return CPU and wall milliseconds per group, over some batches."""
    per_batch = shape.groups_per_batch
    done: list[tuple[list[SentGroup], Answer | None]] = []
    cpu_before, began = driver.server.cpu_seconds(), time.perf_counter()
    for number in range(batches):
        start = number * per_batch % (len(groups) - per_batch + 1)
        chosen = groups[start : start + per_batch]
        submit_all(driver, chosen, pool)
        done.append((chosen, driver.fetch()))
    cpu, wall = driver.server.cpu_seconds() - cpu_before, time.perf_counter() - began
    for chosen, answer in ((chosen, answer) for chosen, answer in done if answer is not None):
        compare(chosen, driver.decode(answer))
    count = batches * per_batch
    return 1e3 * cpu / count, 1e3 * wall / count
