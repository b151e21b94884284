"""What a step did, as metrics: its batch's rewards, ages and counts, its times, the last publish; and a line a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from atropos_api.common import metric_names as names
from example_trainer.objective.metrics import reward_metrics, staleness_metrics

if TYPE_CHECKING:
    from example_trainer.data import TrainingBatch
    from example_trainer.learning.tail import Progress
    from example_trainer.training import StepResult
    from example_trainer.weights.bridge import PublishReport

logger = logging.getLogger(__name__)

FLAT_REWARD_STEPS = 5


class FlatReward:
    """Warns once when several batches in a row had nothing to learn."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def check(self, batch: TrainingBatch) -> None:
        self._in_a_row = 0 if batch.rows else self._in_a_row + 1
        if self._in_a_row == FLAT_REWARD_STEPS:
            logger.warning(
                "%d batches in a row had nothing to learn: every group's rewards are alike (flat reward); look at the "
                "task's difficulty and its reward function",
                FLAT_REWARD_STEPS,
            )


class StepClock:
    """The times of one step, in seconds, from its construction on."""

    def __init__(self) -> None:
        self._started = self._fetched = self._trained = time.monotonic()
        self._waited = 0.0

    def fetched(self) -> None:
        self._fetched = time.monotonic()

    def trained(self) -> None:
        self._trained = time.monotonic()

    def waiting(self, action: Callable[[], None]) -> None:
        """Do what the training has to wait for, and count its time apart."""
        started = time.monotonic()
        action()
        self._waited += time.monotonic() - started

    def metrics(self, response_tokens: int) -> dict[str, float]:
        """All times of the step, and the rate at which it got through its batch's sampled tokens."""
        now = time.monotonic()
        return {
            names.TIME_STEP: now - self._started,
            names.TIME_FETCH: self._fetched - self._started,
            "time/train": self._trained - self._fetched - self._waited,
            "time/sync_wait": now - self._trained + self._waited,
            names.TOKENS_PER_SECOND: response_tokens / max(now - self._started, 1e-9),
        }


def measure(batch: TrainingBatch, result: StepResult, progress: Progress) -> dict[str, float]:
    """Metrics of the batch and of what the step made of it; ages count from the step before."""
    targets = batch.targets
    metrics = reward_metrics(batch.rewards, batch.response_lengths) | result.metrics
    metrics |= staleness_metrics(targets.version_bounds, progress.steps_by_version, progress.step)
    metrics |= {f"data/{cause}": float(count) for cause, count in batch.counts.items()}
    metrics["data/trained_tokens"] = float(len(targets))
    return metrics


def publish_metrics(report: PublishReport | None) -> dict[str, float]:
    """Times and recomputed share of the last publish."""
    if report is None:
        return {}
    return {
        names.TIME_SYNC: report.seconds,
        "time/sync_fence": report.fence_seconds,
        names.RECOMPUTED_FRACTION: report.recomputed_tokens / max(1, report.generated_tokens),
    }


def say(step: int, steps: int, metrics: dict[str, float]) -> None:
    """One line in the log for a step."""
    logger.info(
        "step %d/%d reward %.3f length %.1f loss %.4f staleness %.1f %.2f s",
        step,
        steps,
        metrics[names.REWARD_MEAN],
        metrics[names.RESPONSE_LENGTH_MEAN],
        metrics.get(names.TRAIN_LOSS, 0.0),
        metrics.get(names.STALENESS_MEAN, 0.0),
        metrics[names.TIME_STEP],
    )
