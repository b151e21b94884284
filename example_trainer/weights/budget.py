"""How often to publish, so that recomputing what a publish interrupts does not eat the generation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from example_trainer.weights.bridge import PublishReport


class SyncBudget:
    """`--sync-budget` as a rule over the publishes of the last seconds.

    Each publish makes the server compute the KV entries of its paused requests again. While those
    tokens exceed `share` of the tokens generated in the window, the next publish waits, but never
    for more than `most_steps` optimizer steps (the staleness bound, where there is one).
    """

    def __init__(
        self,
        share: float,
        *,
        most_steps: int | None = None,
        window_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._most_steps = most_steps
        self._window_seconds = window_seconds
        self._clock = clock
        self._publishes: deque[tuple[float, int, int]] = deque()

    def note(self, report: PublishReport) -> None:
        self._publishes.append((self._clock(), report.recomputed_tokens, report.generated_tokens))

    def recomputed_fraction(self) -> float:
        """Recomputed over generated tokens of the publishes within the window."""
        oldest = self._clock() - self._window_seconds
        while self._publishes and self._publishes[0][0] < oldest:
            self._publishes.popleft()
        recomputed = sum(entry[1] for entry in self._publishes)
        return recomputed / max(1, sum(entry[2] for entry in self._publishes)) if recomputed else 0.0

    def allows(self, steps_since_publish: int) -> bool:
        """Whether to publish now, that many optimizer steps after the last time."""
        if steps_since_publish < 1:
            return False
        if self._most_steps is not None and steps_since_publish >= max(1, self._most_steps):
            return True
        return self.recomputed_fraction() <= self._share
