"""Counts and durations of an environment server's rollouts.

`RolloutMetrics` counts since the last trainer step that was logged, for Weights & Biases, and in `totals` since the
start, for Prometheus.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

KEPT_TIMINGS = 1000

BUCKET_SECONDS: Final = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200, 3600)
"""Bounds of the histogram of rollouts: from an answer in one word to an agent that works for an hour."""


class Buckets:
    """Counts of durations by upper bounds in seconds, for a histogram."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.total_seconds = 0.0
        self._counts = dict.fromkeys([*sorted(bounds), math.inf], 0)

    def add(self, seconds: float) -> None:
        self.total_seconds += seconds
        self._counts[next(bound for bound in self._counts if seconds <= bound)] += 1

    def cumulative(self) -> list[tuple[float, int]]:
        """Return, for each bound, the number of durations up to it."""
        return list(zip(self._counts, accumulate(self._counts.values()), strict=True))


@dataclass(slots=True)
class RolloutTotals:
    """Counts since the start of the process."""

    retried: int = 0
    redrawn: int = 0
    """Members of groups that were late or failed and were drawn again."""
    absent: int = 0
    """Members without which groups were closed."""
    sampled_tokens: int = 0
    succeeded: Buckets = field(default_factory=lambda: Buckets(BUCKET_SECONDS))
    failed: Buckets = field(default_factory=lambda: Buckets(BUCKET_SECONDS))


@dataclass(slots=True)
class RolloutMetrics:
    """Counters since the last summary: timings keep the latest thousand, so memory is bounded."""

    sent: int = 0
    rejected: int = 0
    failed: int = 0
    retried: int = 0
    seconds_succeeded: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMINGS))
    seconds_failed: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMINGS))
    totals: RolloutTotals = field(default_factory=RolloutTotals)

    def count_retry(self) -> None:
        self.retried += 1
        self.totals.retried += 1

    def count_redrawn(self, members: int) -> None:
        self.totals.redrawn += members

    def count_absent(self, members: int) -> None:
        self.totals.absent += members

    def count_rollout(self, seconds: float, *, succeeded: bool) -> None:
        """Count an item that was collected, or given up, after this time."""
        timings, buckets = (
            (self.seconds_succeeded, self.totals.succeeded) if succeeded else (self.seconds_failed, self.totals.failed)
        )
        timings.append(seconds)
        buckets.add(seconds)

    def summary(self, lengths: Sequence[int], max_token_length: int) -> dict[str, float]:
        """Return the metrics by the original Atropos' names, with statistics of the trained tokens, and reset the
        counters.
        """
        metrics: dict[str, float] = {
            "train/items_sent_to_api": self.sent,
            "train/items_rejected": self.rejected,
            "train/items_failed": self.failed,
            "train/items_retried": self.retried,
            **_spread("train_perf/succeeded_task_duration", self.seconds_succeeded),
            **_spread("train_perf/failed_task_duration", self.seconds_failed),
            **_spread("train_perf/task_duration", [*self.seconds_succeeded, *self.seconds_failed]),
        }
        if lengths:
            spread = _spread("train/completion_lengths", lengths)
            metrics["train/completion_lengths"] = spread.pop("train/completion_lengths_mean")
            metrics |= spread
            if max_token_length > 0:  # `process` has no run that would limit it
                near_limit = sum(length > 0.95 * max_token_length for length in lengths)
                metrics["train/completion_lengths_p95"] = near_limit / len(lengths)
        self.sent = self.rejected = self.failed = self.retried = 0
        return metrics


def _spread(name: str, values: Sequence[float] | deque[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return {
        f"{name}_mean": mean,
        f"{name}_std": deviation,
        f"{name}_max": float(max(values)),
        f"{name}_min": float(min(values)),
    }
