"""How long requests to one server took and how often they were repeated, apart for training and evaluation."""

from __future__ import annotations

from collections import deque


class Timings:
    """The latest requests of one split."""

    def __init__(self, window: int) -> None:
        self.seconds: deque[float] = deque(maxlen=window)
        self.attempts: deque[int] = deque(maxlen=window)

    def note(self, seconds: float, attempts: int) -> None:
        self.seconds.append(seconds)
        self.attempts.append(attempts)

    def summary(self, prefix: str) -> dict[str, float]:
        """Mean, deviation and 99th percentile by Atropos' names; empty where nothing was asked."""
        count = len(self.seconds)
        if not count:
            return {}
        mean = sum(self.seconds) / count
        deviation = (sum((value - mean) ** 2 for value in self.seconds) / count) ** 0.5
        ordered = sorted(self.seconds)
        return {
            f"{prefix}request_time_avg": mean,
            f"{prefix}request_time_std": deviation,
            f"{prefix}request_time_99p": ordered[min(count - 1, int(count * 0.99))],
        }

    @property
    def mean_attempts(self) -> float:
        return sum(self.attempts) / len(self.attempts) if self.attempts else 0.0

    @property
    def retry_rate(self) -> float:
        return sum(count > 1 for count in self.attempts) / len(self.attempts) if self.attempts else 0.0
