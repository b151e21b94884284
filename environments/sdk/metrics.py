"""What an environment server counts and times, summed up when the trainer makes a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT_TIMINGS = 1000


@dataclass(slots=True)
class RolloutMetrics:
    """Counters since the last summary; timings keep the latest thousand, so nothing grows."""

    sent: int = 0
    rejected: int = 0
    failed: int = 0
    retried: int = 0
    seconds_succeeded: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMINGS))
    seconds_failed: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMINGS))

    def summary(self, lengths: Sequence[int], max_token_length: int) -> dict[str, float]:
        """The metrics by Atropos' names, with the numbers of trained tokens; the counters begin anew."""
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
