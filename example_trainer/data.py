"""Conversion of a broker batch into training data: rows for the forward, and arrays over all trained tokens.

A token is trained where its mask is not -100. It is predicted by the state one position before it, so the arrays
hold one entry per trained token (label, rollout logprob, advantage, temperature, version) and the packing finds the
state; nothing is padded or shifted by hand. `group_sequences` reads the arrays of one sequence.

Sequences without a learning signal are left out: groups without reward differences, `set_advantage_to_zero`, rows
without a trained token, rows longer than `--seq-len` (unless these are cut), and truncated answers if those are masked.
Their rewards stay in their group's baseline. Absent members of closed groups are taken out before, rewards too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_api.wire import Batch, Group
from example_trainer.errors import BadBatch, MissingLogprobs
from example_trainer.group_sequences import MASKED, Candidate, override_of, read_sequence
from example_trainer.modeling.micro_batches import Row
from example_trainer.objective.advantages import (
    AdvantageSettings,
    OverlongSettings,
    compute_advantages,
    has_signal,
    is_truncated,
    overlong_penalty,
    shuffle,
)
from example_trainer.objective.losses import Targets
from example_trainer.options.training_options import TrainingOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """The settings that shape a step's training data."""

    max_tokens: int
    advantages: AdvantageSettings
    cuts_overlong: bool = False
    """True if a longer sequence is cut to `max_tokens` and trained; else it is left out."""
    overlong: OverlongSettings = field(default_factory=OverlongSettings)
    teacher: bool = False
    """True if the loss learns from `distill_token_ids`; else they are not read."""
    shuffle_advantages: bool = False
    seed: int = 0
    vocabulary: int | None = None
    """Number of the policy's tokens: a larger id is an error; None: not checked."""
    leaves_out_unusable: bool = False
    """True if a group that cannot be trained is left out; else it is an error."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """One batch in the form that the learner trains on."""

    number: int
    rows: list[Row]
    targets: Targets
    rewards: list[float]
    """Rewards of all sequences of the batch, trained or not."""
    advantages: list[list[float]]
    """Advantages of all sequences by group, trained or not; the mean over tokens where an environment gives them."""
    response_lengths: list[int]
    """Number of sampled tokens of every sequence, counted by its mask."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of sequences that were left out (or cut), by cause."""
    overlong_penalty: float = 0.0
    """Mean of the (negative) length penalties; `rewards` do not include it."""


def data_settings(config: TrainingOptions, *, vocabulary: int | None = None) -> DataSettings:
    raw_rewards = config.loss_type == "no_baseline"
    return DataSettings(
        max_tokens=config.seq_len,
        cuts_overlong=config.overlong == "mask",
        advantages=AdvantageSettings(
            baseline="none" if raw_rewards else "group",
            norm="none" if raw_rewards else config.advantage_norm,
            std=config.advantage_std,
        ),
        overlong=OverlongSettings(
            limit=config.max_response_tokens,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
            mask=config.mask_overlong,
        ),
        teacher=config.distill != "none",
        shuffle_advantages=config.shuffle_advantages,
        seed=config.seed,
        vocabulary=vocabulary,
        leaves_out_unusable=config.unusable_groups == "leave_out",
    )


def prepare_batch(
    batch: Batch, settings: DataSettings, *, whole: Batch | None = None, absent: int = 0
) -> TrainingBatch:
    """Check a batch and convert it into training data; a pure function of the arguments.

    `whole` is the full batch of which `batch` is one rank's share; only a std over the whole batch needs it. `absent`
    is the number of sequences that `leave_out_absent` took out of it.
    """
    counts = dict.fromkeys(("overlong", "truncated", "no_signal", "no_trained_token", "zeroed", "unusable"), 0)
    counts["absent"] = absent
    read = [_read_group(group, number, settings) for number, group in enumerate(batch.groups)]
    lengths = [length for group in batch.groups for length in _lengths(group)]
    scores = [_scores(group, settings) for group in batch.groups]
    whole_batch_scores = None if whole is None else [_scores(group, settings) for group in whole.groups]
    advantages = compute_advantages(scores, settings.advantages, batch=whole_batch_scores)
    kept: list[Candidate] = []
    by_group: list[list[float]] = []
    for group, rewards, values, candidates in zip(batch.groups, scores, advantages, read, strict=True):
        if not candidates:
            counts["unusable"] += len(group.tokens)
            by_group.append([0.0] * len(group.tokens))
            continue
        signal = _has_signal(rewards, candidates, settings)
        by_group.append([_advantage(group, index, values, candidates[index]) for index in range(len(candidates))])
        for index, candidate in enumerate(candidates):
            cause = _why_left_out(group, candidate, index, signal, settings)
            if cause == "overlong" and settings.cuts_overlong:
                candidate.cut(settings.max_tokens)
                counts[cause] += len(candidate.targets) > 0  # else it is counted below, by its other cause alone
                cause = None if len(candidate.targets) else "no_trained_token"
            if cause is None:
                candidate.advantage = float(values[index])
                kept.append(candidate)
            else:
                counts[cause] += 1
    if settings.shuffle_advantages:
        _shuffle_advantages(kept, settings.seed, batch.number)
    return TrainingBatch(
        number=batch.number,
        rows=_rows(kept),
        targets=_targets(kept),
        rewards=[float(score) for group in batch.groups for score in group.scores],
        advantages=by_group,
        response_lengths=lengths,
        counts=counts,
        overlong_penalty=sum(overlong_penalty(length, settings.overlong) for length in lengths) / max(1, len(lengths)),
    )


def _read_group(group: Group, number: int, settings: DataSettings) -> list[Candidate]:
    """Return the sequences of a group; none of a group that cannot be trained, if such are left out."""
    try:
        indices = range(len(group.tokens))
        return [read_sequence(group, number, index, settings.teacher, settings.vocabulary) for index in indices]
    except (BadBatch, MissingLogprobs) as error:
        if not settings.leaves_out_unusable:
            raise type(error)(f"{error}; or go on without such groups by --unusable-groups leave_out") from None
        logger.warning("a group is left out: %s", error)
        return []


def _scores(group: Group, settings: DataSettings) -> list[float]:
    """Return a group's rewards with the length penalties applied."""
    penalties = (overlong_penalty(length, settings.overlong) for length in _lengths(group))
    return [float(score) + penalty for score, penalty in zip(group.scores, penalties, strict=True)]


def _lengths(group: Group) -> list[int]:
    """Return the number of sampled tokens of each sequence; a first token is predicted by nothing and not counted."""
    return [int(np.count_nonzero(np.asarray(mask)[1:] != MASKED)) for mask in group.masks]


def generator_for(seed: int, batch_number: int) -> torch.Generator:
    """Return the random generator for one batch of one run.

    `SeedSequence` mixes both numbers first, because torch's generator ignores seed bits above the lowest 32.
    """
    (mixed,) = np.random.SeedSequence([seed, batch_number]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed))


def report_logprobs(batch: Batch) -> None:
    """Log that the rollouts carry the logprobs that importance sampling needs; called for a run's first batch."""
    sample = next((group.inference_logprobs[0] for group in batch.groups if group.inference_logprobs), None)
    if sample is not None:
        logger.info("inference_logprobs found in batch (sample len: %d)", len(sample))


def _is_zeroed(group: Group, index: int) -> bool:
    return bool(override_of(group, index).get("set_advantage_to_zero"))


def _advantage(group: Group, index: int, values: Tensor, candidate: Candidate) -> float:
    """Return one sequence's advantage, as a metric: 0 if the environment asks for that."""
    if _is_zeroed(group, index):
        return 0.0
    given = candidate.advantages
    return float(values[index]) if given is None or not len(given) else float(np.mean(given))


def _why_left_out(group: Group, candidate: Candidate, index: int, signal: bool, settings: DataSettings) -> str | None:
    causes = (
        (not len(candidate.targets), "no_trained_token"),
        (_is_zeroed(group, index), "zeroed"),
        (not signal, "no_signal"),
        (settings.overlong.mask and is_truncated(len(candidate.targets), settings.overlong), "truncated"),
        (len(candidate.tokens) > settings.max_tokens, "overlong"),  # last, because these may be cut and trained
    )
    return next((cause for holds, cause in causes if holds), None)


def _has_signal(rewards: Sequence[float], candidates: Sequence[Candidate], settings: DataSettings) -> bool:
    """Return True if a group can change the policy: always with a teacher, else if any advantage is not 0.

    A group is judged as a whole: a sequence whose own advantage is 0 still counts in the loss's average.
    """
    if any(candidate.teacher is not None for candidate in candidates):
        return True
    supplied = [candidate.advantages for candidate in candidates if candidate.advantages is not None]
    if any(bool(np.any(values)) for values in supplied):
        return True
    return len(supplied) < len(candidates) and has_signal(rewards, settings.advantages)


def _shuffle_advantages(kept: Sequence[Candidate], seed: int, batch_number: int) -> None:
    generator = generator_for(seed, batch_number)
    own = [candidate for candidate in kept if candidate.advantages is None]
    for candidate, value in zip(own, shuffle(torch.tensor([c.advantage for c in own]), generator), strict=True):
        candidate.advantage = float(value)


def _rows(kept: Sequence[Candidate]) -> list[Row]:
    rows: list[Row] = []
    first = 0
    for candidate in kept:
        row = Row(
            tokens=candidate.tokens,
            targets=candidate.targets,
            first_target=first,
            group=candidate.group,
            sample=candidate.sample,
        )
        rows.append(row)
        first += len(candidate.targets)
    return rows


def _targets(kept: Sequence[Candidate]) -> Targets:
    counts = [len(candidate.targets) for candidate in kept]
    given = [
        np.full(count, candidate.advantage) if candidate.advantages is None else candidate.advantages
        for count, candidate in zip(counts, kept, strict=True)
    ]
    temperatures = [np.full(count, one.temperature) for count, one in zip(counts, kept, strict=True)]
    teacher_ids, teacher_logprobs = _teachers(kept)
    mask_ids, mask_bounds = _sampling_masks(kept)
    return Targets(
        labels=_join([candidate.tokens[candidate.targets] for candidate in kept], np.int64),
        rollout_logprobs=_join([candidate.rollout_logprobs for candidate in kept], np.float32),
        advantages=_join(given, np.float32),
        temperatures=_join(temperatures, np.float32),
        sequences=_join([np.full(count, row) for row, count in enumerate(counts)], np.int64),
        versions=_join([candidate.versions for candidate in kept], np.int64),
        version_bounds=_join([candidate.version_bounds for candidate in kept], np.int64),
        reference_logprobs=_references(kept),
        truncated_sampling=_truncated_sampling(kept),
        mask_ids=mask_ids,
        mask_bounds=mask_bounds,
        teacher_ids=teacher_ids,
        teacher_logprobs=teacher_logprobs,
    )


def _references(kept: Sequence[Candidate]) -> Tensor | None:
    """Return the supplied reference logprobs, NaN for sequences without; None if no sequence has any."""
    given = [candidate.reference_logprobs for candidate in kept]
    if all(values is None for values in given):
        return None
    unknown = [np.full(len(candidate.targets), np.nan) for candidate in kept]
    return _join([own if values is None else values for own, values in zip(unknown, given, strict=True)], np.float32)


def _truncated_sampling(kept: Sequence[Candidate]) -> Tensor | None:
    """Return booleans: True where a distribution was truncated to tokens that are not known; None if no group's was."""
    if not any(candidate.truncated_sampling for candidate in kept):
        return None
    return _join([_unknown_truncation(candidate) for candidate in kept], np.bool_)


def _unknown_truncation(one: Candidate) -> NDArray[np.bool_]:
    if one.sampling_masks is None or not one.truncated_sampling:
        return np.full(len(one.targets), one.truncated_sampling)
    return np.equal(one.sampling_masks[1], 0)


def _sampling_masks(kept: Sequence[Candidate]) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of all masks, token after token, and where each token's begin and end; None if there are none."""
    if all(candidate.sampling_masks is None for candidate in kept):
        return None, None
    nothing = np.zeros(0, dtype=np.int64)
    masks = [one.sampling_masks or (nothing, np.zeros(len(one.targets), dtype=np.int64)) for one in kept]
    bounds = _join([np.zeros(1), *(counts for _, counts in masks)], np.int64).cumsum(0)
    return _join([ids for ids, _ in masks], np.int64), bounds


def _teachers(kept: Sequence[Candidate]) -> tuple[Tensor | None, Tensor | None]:
    """Return the teachers' tokens and logprobs of all sequences, padded to one width; None if there is no teacher."""
    width = max((candidate.teacher[0].shape[1] for candidate in kept if candidate.teacher), default=0)
    if not width:
        return None, None
    total = sum(len(candidate.targets) for candidate in kept)
    ids, logprobs = np.zeros((total, width), dtype=np.int64), np.full((total, width), -np.inf, dtype=np.float32)
    first = 0
    for candidate in kept:
        if candidate.teacher is not None:
            own_ids, own = candidate.teacher
            ids[first : first + len(own), : own.shape[1]] = own_ids
            logprobs[first : first + len(own), : own.shape[1]] = own
        first += len(candidate.targets)
    return torch.from_numpy(ids), torch.from_numpy(logprobs)


def _join(pieces: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    joined = np.concatenate(pieces) if pieces else np.zeros(0)
    return torch.from_numpy(joined.astype(dtype, copy=False))
