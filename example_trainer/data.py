"""From a broker batch to what a step trains on: rows for the forward, and arrays over all trained tokens.

A token is trained where its mask is not -100. It is predicted by the state one position before it, so the arrays
here hold one entry per trained token (label, rollout logprob, advantage, temperature, version) and the packing
finds the state; nothing is padded or shifted by hand. Placeholders of 1.0, which stand in `inference_logprobs`
wherever nothing was sampled, must not be found at a trained token.

Sequences that teach nothing leave here: groups without reward differences, `set_advantage_to_zero`, rows without
a trained token or longer than `--seq-len`. Their rewards stay in their group's baseline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_api.wire import Batch, Group
from example_trainer.config import TrainingConfig
from example_trainer.errors import BadBatch, MissingLogprobs
from example_trainer.objective.advantages import AdvantageSettings, compute_advantages, has_signal, shuffle
from example_trainer.objective.packing import Row

logger = logging.getLogger(__name__)

MASKED = -100
PLACEHOLDER_LOGPROB = 1.0
UNKNOWN_VERSION = -1
DEFAULT_TEMPERATURE = 1.0

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """What of the configuration shapes the data of a step."""

    max_tokens: int
    advantages: AdvantageSettings
    shuffle_advantages: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """Arrays `[N]` over all trained tokens of a batch."""

    labels: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    sequences: Tensor
    """Index of the token's row."""
    versions: Tensor
    """Policy version the token was sampled under; -1 where the group does not say."""
    version_bounds: Tensor
    """The same, with the version at arrival at the broker for unknown ones: a bound of the token's age."""

    def to(self, device: torch.device) -> Targets:
        return Targets(**{name: getattr(self, name).to(device) for name in self.__slots__})

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """One batch, ready for the learner."""

    number: int
    rows: list[Row]
    targets: Targets
    rewards: list[float]
    """Of every sequence of the batch, trained or not."""
    response_lengths: list[int]
    """Sampled tokens of every sequence, by its mask."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many sequences were left out, by cause."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """A sequence that may be trained, before advantages are final."""

    tokens: IntArray
    targets: IntArray
    rollout_logprobs: FloatArray
    temperature: float
    advantages: FloatArray | None
    """Per trained token, when the environment supplies them."""
    versions: IntArray
    version_bounds: IntArray
    group: int
    advantage: float = 0.0


def data_settings(config: TrainingConfig) -> DataSettings:
    raw_rewards = config.loss_type == "no_baseline"
    return DataSettings(
        max_tokens=config.seq_len,
        advantages=AdvantageSettings(
            baseline="none" if raw_rewards else "group",
            norm="none" if raw_rewards else config.advantage_norm,
            std=config.advantage_std,
        ),
        shuffle_advantages=config.shuffle_advantages,
        seed=config.seed,
    )


def prepare_batch(batch: Batch, settings: DataSettings) -> TrainingBatch:
    """Check a batch and lay it out; a pure function of the batch and the settings."""
    counts = {"overlong": 0, "no_signal": 0, "no_trained_token": 0, "zeroed": 0}
    lengths: list[int] = []
    kept: list[_Candidate] = []
    advantages = compute_advantages([group.scores for group in batch.groups], settings.advantages)
    for number, (group, values) in enumerate(zip(batch.groups, advantages, strict=True)):
        candidates = [_read_sequence(group, number, index) for index in range(len(group.tokens))]
        lengths += [len(candidate.targets) for candidate in candidates]
        for index, candidate in enumerate(candidates):
            cause = _why_left_out(group, candidate, index, settings)
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
        response_lengths=lengths,
        counts=counts,
    )


def find_temperature(group: Group, index: int) -> float:
    """The sampling temperature of one sequence: its override, then generation_params, then group_overrides, then 1."""
    overrides = (group.overrides or [])[index : index + 1]
    for source in (*overrides, group.generation_params, group.group_overrides):
        if isinstance(source, Mapping) and source.get("temperature") is not None:
            temperature = float(source["temperature"])
            if temperature <= 0.0:
                raise BadBatch(
                    f"{_where(group, index)}: temperature {temperature:g} gives no distribution to learn from; "
                    "sample rollouts for training at a temperature above 0"
                )
            return temperature
    return DEFAULT_TEMPERATURE


def report_logprobs(batch: Batch) -> None:
    """Say once, at the first batch, that the rollouts carry what importance sampling needs."""
    sample = next((group.inference_logprobs[0] for group in batch.groups if group.inference_logprobs), None)
    if sample is not None:
        logger.info("inference_logprobs found in batch (sample len: %d)", len(sample))


def _read_sequence(group: Group, number: int, index: int) -> _Candidate:
    tokens = np.asarray(group.tokens[index], dtype=np.int64)
    mask = np.asarray(group.masks[index], dtype=np.int64)
    if len(mask) != len(tokens):
        raise BadBatch(f"{_where(group, index)}: {len(tokens)} tokens but {len(mask)} mask entries")
    positions = np.flatnonzero(mask != MASKED)
    targets = positions[positions > 0]  # nothing precedes the first token, so nothing predicts it
    wrong = targets[mask[targets] != tokens[targets]]
    if len(wrong):
        raise BadBatch(
            f"{_where(group, index)}: mask at position {wrong[0]} is {mask[wrong[0]]}, neither -100 nor the token "
            f"{tokens[wrong[0]]}"
        )
    versions = _versions(group, index, len(tokens))[targets]
    bound = UNKNOWN_VERSION if group.received_version is None else group.received_version
    return _Candidate(
        tokens=tokens,
        targets=targets,
        rollout_logprobs=_rollout_logprobs(group, index, targets, len(tokens)),
        temperature=find_temperature(group, index),
        advantages=_supplied_advantages(group, index, targets, len(tokens)),
        versions=versions,
        version_bounds=np.where(versions == UNKNOWN_VERSION, bound, versions),
        group=number,
    )


def _rollout_logprobs(group: Group, index: int, targets: IntArray, length: int) -> FloatArray:
    if not len(targets):
        return np.zeros(0, dtype=np.float32)
    if not group.inference_logprobs:
        raise MissingLogprobs(_missing(group, index, "the group has none"))
    values = np.asarray(group.inference_logprobs[index], dtype=np.float32)
    if len(values) != length:
        raise MissingLogprobs(_missing(group, index, f"{len(values)} logprobs for {length} tokens"))
    chosen = values[targets]
    bad = np.flatnonzero((chosen == PLACEHOLDER_LOGPROB) | ~np.isfinite(chosen))
    if len(bad):
        cause = f"{chosen[bad[0]]:g} at trained position {targets[bad[0]]}"
        raise MissingLogprobs(_missing(group, index, cause))
    return chosen


def _missing(group: Group, index: int, cause: str) -> str:
    return (
        f"GRPO requires inference_logprobs for importance sampling: {_where(group, index)}: {cause}; "
        "let the environment sample through a server that returns logprobs (--openai.server_type vllm)"
    )


def _supplied_advantages(group: Group, index: int, targets: IntArray, length: int) -> FloatArray | None:
    """Advantages sent by the environment: one a token, or a single one for the sequence."""
    if not group.advantages or index >= len(group.advantages) or len(group.advantages[index]) == 0:
        return None
    values = np.asarray(group.advantages[index], dtype=np.float32)
    if len(values) == 1:
        return np.full(len(targets), values[0], dtype=np.float32)
    if len(values) != length:
        raise BadBatch(
            f"{_where(group, index)}: {len(values)} advantages for {length} tokens; send one, or one a token"
        )
    return values[targets]


def _versions(group: Group, index: int, length: int) -> IntArray:
    versions = np.full(length, UNKNOWN_VERSION, dtype=np.int64)
    if group.policy_versions and index < len(group.policy_versions):
        for start, end, version in group.policy_versions[index]:
            versions[start:end] = UNKNOWN_VERSION if version is None else version
    return versions


def _why_left_out(group: Group, candidate: _Candidate, index: int, settings: DataSettings) -> str | None:
    override = group.overrides[index] if group.overrides and index < len(group.overrides) else None
    supplied = candidate.advantages
    signal = has_signal(group.scores, settings.advantages) if supplied is None else bool(np.any(supplied))
    causes = (
        (not len(candidate.targets), "no_trained_token"),
        (bool(override and override.get("set_advantage_to_zero")), "zeroed"),
        (not signal, "no_signal"),
        (len(candidate.tokens) > settings.max_tokens, "overlong"),
    )
    return next((cause for holds, cause in causes if holds), None)


def _shuffle_advantages(kept: Sequence[_Candidate], seed: int, batch_number: int) -> None:
    generator = torch.Generator().manual_seed((seed << 32) ^ batch_number)
    own = [candidate for candidate in kept if candidate.advantages is None]
    for candidate, value in zip(own, shuffle(torch.tensor([c.advantage for c in own]), generator), strict=True):
        candidate.advantage = float(value)


def _rows(kept: Sequence[_Candidate]) -> list[Row]:
    rows: list[Row] = []
    first = 0
    for candidate in kept:
        rows.append(Row(tokens=candidate.tokens, targets=candidate.targets, first_target=first, group=candidate.group))
        first += len(candidate.targets)
    return rows


def _targets(kept: Sequence[_Candidate]) -> Targets:
    counts = [len(candidate.targets) for candidate in kept]
    constants = [np.full(count, candidate.advantage) for count, candidate in zip(counts, kept, strict=True)]
    supplied = [candidate.advantages for candidate in kept]
    return Targets(
        labels=_join([candidate.tokens[candidate.targets] for candidate in kept], np.int64),
        rollout_logprobs=_join([candidate.rollout_logprobs for candidate in kept], np.float32),
        advantages=_join(
            [own if given is None else given for own, given in zip(constants, supplied, strict=True)], np.float32
        ),
        temperatures=_join(
            [np.full(count, candidate.temperature) for count, candidate in zip(counts, kept, strict=True)], np.float32
        ),
        sequences=_join([np.full(count, row) for row, count in enumerate(counts)], np.int64),
        versions=_join([candidate.versions for candidate in kept], np.int64),
        version_bounds=_join([candidate.version_bounds for candidate in kept], np.int64),
    )


def _join(pieces: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    joined = np.concatenate(pieces) if pieces else np.zeros(0)
    return torch.from_numpy(joined.astype(dtype, copy=False))


def _where(group: Group, index: int) -> str:
    environment = "unknown" if group.env_id is None else group.env_id
    return f"environment {environment}, sequence {index} of its group"
