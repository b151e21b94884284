"""Advantages from rewards: a baseline by group, a scale by group, batch or not at all.

A group is all answers to one prompt. Its mean is the baseline; groups whose rewards are all alike carry
no signal and are left out before the forward, so that they cost nothing and dilute no denominator.

Answers that ran into the length limit: which they are, and a penalty that grows as they come near it.

After DAPO (Yu et al. 2025, section 3.4): an answer that was cut off says little about its reasoning, so it is either
left out of the loss or, before that, made a little worse the longer it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SAMPLE_STD_EPS = 1e-4

POPULATION_STD_FLOOR = 1e-8

EQUAL_REWARDS_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """`baseline` none leaves the raw rewards; `std` picks between two published forms of the scale.

    sample: the std with n - 1 plus 1e-4, as TRL divides; for a batch, of the rewards as they are. population: the std
    with n and a floor of 1e-8, as Atropos' trainer divides; for a batch, of the centred rewards.
    """

    baseline: Literal["group", "none"] = "group"
    norm: Literal["none", "group", "batch"] = "group"
    std: Literal["sample", "population"] = "sample"


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards agree within float noise; by range, since a computed std is never exactly 0."""
    return len(rewards) == 0 or max(rewards) - min(rewards) <= EQUAL_REWARDS_TOLERANCE


def has_signal(rewards: Sequence[float], settings: AdvantageSettings) -> bool:
    """Whether a group can move the policy: under a group baseline only when its rewards differ."""
    if settings.baseline == "none":
        return any(reward != 0.0 for reward in rewards)
    return not is_zero_variance(rewards)


def compute_advantages(
    groups: Sequence[Sequence[float]], settings: AdvantageSettings, *, batch: Sequence[Sequence[float]] | None = None
) -> list[Tensor]:
    """Per group a float32 tensor `[G]`; a group of one, or of equal rewards, gets zeros under a group baseline.

    `batch` are the rewards of all its groups where `groups` are the share of one rank: a batch's std is theirs.
    """
    centred = _centre_all(groups, settings)
    if settings.norm == "none" or not centred:
        return [values.float() for values in centred]
    if settings.norm == "group":
        return [_scale(values, values, settings.std).float() for values in centred]
    whole = groups if batch is None else batch
    everything = torch.cat(_tensors(whole) if settings.std == "sample" else _centre_all(whole, settings))
    return [_scale(values, everything, settings.std).float() for values in centred]


def shuffle(advantages: Tensor, generator: torch.Generator) -> Tensor:
    """The same values `[R]` handed to other sequences of the batch: the control that must not learn."""
    return advantages[torch.randperm(len(advantages), generator=generator)]


def _tensors(groups: Sequence[Sequence[float]]) -> list[Tensor]:
    return [torch.tensor(list(values), dtype=torch.float64) for values in groups]


def _centre_all(groups: Sequence[Sequence[float]], settings: AdvantageSettings) -> list[Tensor]:
    return [_centre(values, settings) for values in _tensors(groups)]


def _centre(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    if settings.baseline == "none":
        return rewards
    if is_zero_variance(rewards.tolist()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def _scale(values: Tensor, population: Tensor, form: str) -> Tensor:
    if form == "population":
        return values / population.std(correction=0).clamp(min=POPULATION_STD_FLOOR)
    if len(population) < 2:
        return values / (1.0 + SAMPLE_STD_EPS)
    return values / (population.std(correction=1) + SAMPLE_STD_EPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongSettings:
    """`limit` is the longest answer in tokens; without one nothing is overlong."""

    limit: int | None = None
    buffer: int = 0
    """Tokens before the limit over which the penalty grows from 0 to its whole."""
    penalty: float = 0.0
    """Taken from the reward at the limit; 0: none."""
    mask: bool = False
    """Whether answers at the limit are left out of forward and denominators."""


def is_truncated(length: int, settings: OverlongSettings) -> bool:
    """Whether an answer of `length` tokens reached the limit; one that ended just there cannot be told apart."""
    return settings.limit is not None and length >= settings.limit


def overlong_penalty(length: int, settings: OverlongSettings) -> float:
    """What is added to the reward of an answer of `length` tokens: 0 down to -`penalty` (DAPO's equation 13)."""
    if settings.limit is None or not settings.penalty:
        return 0.0
    beyond = length - (settings.limit - settings.buffer)
    share = 1.0 if length >= settings.limit else 0.0 if beyond <= 0 else beyond / settings.buffer
    return -settings.penalty * share
