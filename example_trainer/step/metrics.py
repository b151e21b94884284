"""Metrics of a step: rewards, staleness and counts of its batch, times, the last publish; and a log line per step.

`describe` computes the metrics of a batch before training: lengths, repetition, and values per environment. It works on
the batch as the broker sent it, in the thread that fetches it, so that it adds no time to the step.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from atropos_api.common import metric_names as names
from atropos_api.common.tracing import traceparent_of
from atropos_api.wire import Batch, Group
from example_trainer.group_sequences import MASKED
from example_trainer.objective.metrics import reward_metrics, staleness_metrics, token_ages

if TYPE_CHECKING:
    from torch import Tensor

    from example_trainer.data import TrainingBatch
    from example_trainer.objective.losses import Targets
    from example_trainer.state import Progress
    from example_trainer.training import StepResult
    from example_trainer.weights.base import PublishReport

logger = logging.getLogger(__name__)

GIB = 2**30


class StepClock:
    """The clock of one step: it measures the step's times in seconds, from its construction on."""

    def __init__(self) -> None:
        self._started = self._fetched = self._trained = time.monotonic()
        self._waited = 0.0
        self.fetched_at = 0.0
        """The time at which the batch had arrived, in seconds since 1970."""

    def fetched(self) -> None:
        self._fetched, self.fetched_at = time.monotonic(), time.time()

    def trained(self) -> None:
        self._trained = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the `with` block, which training has to wait for, separately from training time."""
        started = time.monotonic()
        yield
        self._waited += time.monotonic() - started

    def metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return all times of the step, and its token rates in tokens per second."""
        sampled_tokens, trained_tokens = sum(batch.response_lengths), len(batch.targets)
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
    """Return the step's training metrics, and the rewards and the staleness (before this step) of its batch."""
    metrics = reward_metrics(batch.rewards, batch.response_lengths) | result.metrics
    return metrics | staleness_metrics(ages_of(batch, progress))


def ages_of(batch: TrainingBatch, progress: Progress) -> Tensor:
    """Return `[N]` the ages of a batch's trained tokens, in steps up to the weights that it is trained on."""
    return token_ages(batch.targets.version_bounds, progress.steps_by_version, progress.weights_step)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in GiB, and the peak of its GPU memory since the last call."""
    found = {names.HOST_MEMORY: psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        found[names.GPU_MEMORY] = torch.cuda.max_memory_allocated(device) / GIB
        found[names.GPU_MEMORY_RESERVED] = torch.cuda.memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return found


def publish_metrics(report: PublishReport | None) -> dict[str, float]:
    """Return the times and the share of recomputed tokens of the last publish."""
    if report is None:
        return {}
    return {
        names.TIME_SYNC: report.seconds,
        names.TIME_SYNC_FENCE: report.fence_seconds,
        names.TIME_SYNC_LOSS: report.loss_seconds,
        names.TIME_SYNC_EXPECTED_LOSS: report.expected_loss_seconds,
        names.RECOMPUTED_FRACTION: report.recomputed_tokens / max(1, report.generated_tokens),
    }


def log_step(step: int, steps: int, metrics: dict[str, float]) -> None:
    """Log one line for a step."""
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


NGRAM_TOKENS = 4
UNKNOWN_ENVIRONMENT = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedBatch:
    """A batch ready to train, with the metrics that are known before training."""

    training: TrainingBatch
    """The share of the batch that this process trains on."""
    whole: TrainingBatch
    """The whole batch; equal to `training` if there is one process."""
    metrics: dict[str, float]
    """Metrics of the whole batch."""
    groups: Sequence[Group]
    """The groups of `training`, as they were sent."""
    places: Sequence[int]
    """The index of each of these groups in the whole batch."""
    traceparents: tuple[str, ...] = ()
    """The spans of the whole batch's traced groups, as their environments handed them on."""


def describe(batch: Batch, training: TrainingBatch) -> PreparedBatch:
    """Return `training` together with the metrics of the batch that it was made from."""
    answers = [answer for group in batch.groups for answer in _answers(group)]
    lengths = [len(answer) for answer in answers]
    metrics = _length_metrics(lengths, [len(row.targets) for row in training.rows])
    metrics[names.RESPONSE_REPETITION] = repetition(answers)
    metrics |= _share_metrics(training, sum(lengths))
    metrics |= _mask_metrics(training.targets)
    metrics |= advantage_metrics(training.advantages)
    metrics |= _environment_metrics(batch.groups)
    traces = (traceparent_of(group.generation_params) for group in batch.groups)
    traceparents = tuple(traceparent for traceparent in traces if traceparent is not None)
    return PreparedBatch(
        training=training,
        whole=training,
        metrics=metrics,
        groups=batch.groups,
        places=range(len(batch.groups)),
        traceparents=traceparents,
    )


def repetition(answers: Iterable[NDArray[np.int64]]) -> float:
    """Return the share `[0, 1]` of n-grams that occurred before in the same answer, over all answers with an n-gram."""
    total = repeated = 0
    for answer in answers:
        if len(answer) < NGRAM_TOKENS:
            continue
        grams = np.lib.stride_tricks.sliding_window_view(answer, NGRAM_TOKENS)
        total += len(grams)
        repeated += len(grams) - len(np.unique(grams, axis=0))
    return repeated / total if total else 0.0


def _answers(group: Group) -> list[NDArray[np.int64]]:
    """Return the sampled tokens of each sequence."""
    rows = zip(group.tokens, group.masks, strict=True)
    return [np.asarray(tokens, dtype=np.int64)[np.asarray(mask) != MASKED] for tokens, mask in rows]


def _length_metrics(lengths: Sequence[int], trained: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    values = np.asarray(lengths, dtype=np.float64)
    found = {
        names.RESPONSE_LENGTH_STD: float(values.std()),
        names.RESPONSE_LENGTH_MIN: float(values.min()),
        names.RESPONSE_LENGTH_MAX: float(values.max()),
    }
    if trained:
        found[names.TRAINED_LENGTH_MEAN] = float(np.mean(trained))
    return found


def _share_metrics(training: TrainingBatch, sampled_tokens: int) -> dict[str, float]:
    sequences = len(training.rewards)
    return {
        names.SEQUENCES: float(sequences),
        names.TRAINED_TOKENS: float(len(training.targets)),
        names.TRAINED_FRACTION: len(training.targets) / max(1, sampled_tokens),
        names.REWARD_OVERLONG_PENALTY: training.overlong_penalty,
        names.NO_SIGNAL_FRACTION: training.counts.get("no_signal", 0) / max(1, sequences),
        **{names.LEFT_OUT.format(cause=cause): float(count) for cause, count in training.counts.items()},
    }


def _mask_metrics(targets: Targets) -> dict[str, float]:
    """Return the share of tokens with a sampling mask among those of a truncated distribution, if there are any."""
    known = 0 if targets.mask_bounds is None else int((targets.mask_bounds.diff() > 0).sum())
    unknown = 0 if targets.truncated_sampling is None else int(targets.truncated_sampling.sum())
    return {names.SAMPLING_MASK_FRACTION: known / (known + unknown)} if known + unknown else {}


def advantage_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return statistics of the advantages of all sequences, and the share of groups in which all are 0."""
    values = np.asarray([value for group in groups for value in group], dtype=np.float64)
    if not len(values):
        return {}
    return {
        names.ADVANTAGE_MEAN: float(values.mean()),
        names.ADVANTAGE_STD: float(values.std()),
        names.ADVANTAGE_MIN: float(values.min()),
        names.ADVANTAGE_MAX: float(values.max()),
        names.ADVANTAGE_ZERO_GROUPS: sum(not any(group) for group in groups) / len(groups),
    }


def _environment_metrics(groups: Iterable[Group]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for group in groups:
        name = UNKNOWN_ENVIRONMENT if group.env_id is None else str(group.env_id)
        rewards[name] += [float(score) for score in group.scores]
        lengths[name] += [len(answer) for answer in _answers(group)]
    found: dict[str, float] = {}
    for name in sorted(name for name, values in rewards.items() if values):
        found[names.ENV_SEQUENCES.format(id=name)] = float(len(rewards[name]))
        found[names.ENV_REWARD_MEAN.format(id=name)] = float(np.mean(rewards[name]))
        found[names.ENV_REWARD_STD.format(id=name)] = float(np.std(rewards[name]))
        found[names.ENV_LENGTH_MEAN.format(id=name)] = float(np.mean(lengths[name]))
    return found
