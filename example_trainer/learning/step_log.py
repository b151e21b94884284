"""What a step did, as metrics: its batch's rewards, ages and counts, its times, the last publish; and a line a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import torch

from atropos_api.common import metric_names as names
from example_trainer.objective.metrics import reward_metrics, staleness_metrics

if TYPE_CHECKING:
    from example_trainer.data import TrainingBatch
    from example_trainer.learning.tail import Progress
    from example_trainer.training import StepResult
    from example_trainer.weights.bridge import PublishReport

logger = logging.getLogger(__name__)

GIB = 2**30


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

    def metrics(self, *, sampled_tokens: int, trained_tokens: int) -> dict[str, float]:
        """All times of the step, and the rates at which it got through its batch's tokens."""
        now = time.monotonic()
        training = self._trained - self._fetched - self._waited
        return {
            names.TIME_STEP: now - self._started,
            names.TIME_FETCH: self._fetched - self._started,
            names.TIME_TRAIN: training,
            names.TIME_SYNC_WAIT: now - self._trained + self._waited,
            names.TOKENS_PER_SECOND: sampled_tokens / max(now - self._started, 1e-9),
            names.TRAINED_TOKENS_PER_SECOND: trained_tokens / max(training, 1e-9),
        }


def measure(batch: TrainingBatch, result: StepResult, progress: Progress) -> dict[str, float]:
    """What the step made of its batch, and the batch's rewards and ages; ages count from the step before."""
    metrics = reward_metrics(batch.rewards, batch.response_lengths) | result.metrics
    return metrics | staleness_metrics(batch.targets.version_bounds, progress.steps_by_version, progress.step)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Memory of this process in GiB, and of its GPU since the last call."""
    found = {names.HOST_MEMORY: psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        found[names.GPU_MEMORY] = torch.cuda.max_memory_allocated(device) / GIB
        found[names.GPU_MEMORY_RESERVED] = torch.cuda.memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return found


def publish_metrics(report: PublishReport | None) -> dict[str, float]:
    """Times and recomputed share of the last publish."""
    if report is None:
        return {}
    return {
        names.TIME_SYNC: report.seconds,
        names.TIME_SYNC_FENCE: report.fence_seconds,
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
