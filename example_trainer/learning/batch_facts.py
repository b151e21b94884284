"""What a batch is, as metrics, before anything is trained: lengths, repetition, and each environment by itself.

Computed from the batch as the broker sent it, in the thread that fetches it, so that it costs the step nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_api.common import metric_names as names
from atropos_api.wire import Batch, Group
from example_trainer.data import MASKED, TrainingBatch

NGRAM_TOKENS = 4
UNKNOWN_ENVIRONMENT = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedBatch:
    """A batch ready to train, and what is known of it beforehand."""

    training: TrainingBatch
    """What this process trains on."""
    whole: TrainingBatch
    """All of the batch; the same where there is one process."""
    metrics: dict[str, float]
    """Of all of it."""


def describe(batch: Batch, training: TrainingBatch) -> PreparedBatch:
    """`training` with the metrics of the batch that it was made of."""
    answers = [answer for group in batch.groups for answer in _answers(group)]
    lengths = [len(answer) for answer in answers]
    metrics = _length_metrics(lengths, [len(row.targets) for row in training.rows])
    metrics[names.RESPONSE_REPETITION] = repetition(answers)
    metrics |= _share_metrics(training, sum(lengths))
    metrics |= _environment_metrics(batch.groups)
    return PreparedBatch(training=training, whole=training, metrics=metrics)


def repetition(answers: Iterable[NDArray[np.int64]], ngram_tokens: int = NGRAM_TOKENS) -> float:
    """Share of n-grams `[0, 1]` that occurred before in the same answer, over all answers long enough for one."""
    total = repeated = 0
    for answer in answers:
        if len(answer) < ngram_tokens:
            continue
        grams = np.lib.stride_tricks.sliding_window_view(answer, ngram_tokens)
        total += len(grams)
        repeated += len(grams) - len(np.unique(grams, axis=0))
    return repeated / total if total else 0.0


def _answers(group: Group) -> list[NDArray[np.int64]]:
    """The sampled tokens of each sequence."""
    rows = zip(group.tokens, group.masks, strict=True)
    return [np.asarray(tokens, dtype=np.int64)[np.asarray(mask) != MASKED] for tokens, mask in rows]


def _length_metrics(lengths: Sequence[int], trained: Sequence[int]) -> dict[str, float]:
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


def _environment_metrics(groups: Iterable[Group]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for group in groups:
        name = UNKNOWN_ENVIRONMENT if group.env_id is None else str(group.env_id)
        rewards[name] += [float(score) for score in group.scores]
        lengths[name] += [len(answer) for answer in _answers(group)]
    found: dict[str, float] = {}
    for name in sorted(rewards):
        found[names.ENV_SEQUENCES.format(id=name)] = float(len(rewards[name]))
        found[names.ENV_REWARD_MEAN.format(id=name)] = float(np.mean(rewards[name]))
        found[names.ENV_REWARD_STD.format(id=name)] = float(np.std(rewards[name]))
        found[names.ENV_LENGTH_MEAN.format(id=name)] = float(np.mean(lengths[name]))
    return found
