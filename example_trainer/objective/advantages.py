"""Advantages from rewards (a baseline per group; a scale per group, per batch or none) and length penalties.

A group is all answers to one prompt. Its mean is the baseline; groups whose rewards are all equal carry
no signal and are left out before the forward, so that they cost nothing and are not counted in any denominator.

Overlong answers follow DAPO (Yu et al. 2025, section 3.4): a truncated answer says little about its reasoning, so it is
left out of the loss, or its reward gets a penalty that grows with length as the answer nears the limit.
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
    """The settings of advantages: `baseline` none keeps raw rewards, `std` selects one of two published scales.

    sample: the std with n - 1 plus 1e-4, as TRL divides; for a batch, of the rewards as they are. population: the std
    with n and a floor of 1e-8, as Atropos' trainer divides; for a batch, of the centred rewards.
    """

    baseline: Literal["group", "none"] = "group"
    norm: Literal["none", "group", "batch"] = "group"
    std: Literal["sample", "population"] = "sample"


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal within float noise; uses the range, as a computed std is never exactly 0."""
    return len(rewards) == 0 or max(rewards) - min(rewards) <= EQUAL_REWARDS_TOLERANCE


def has_signal(rewards: Sequence[float], settings: AdvantageSettings) -> bool:
    """Return True if a group can change the policy; with a group baseline only if its rewards differ."""
    if settings.baseline == "none":
        return any(reward != 0.0 for reward in rewards)
    return not is_zero_variance(rewards)


def compute_advantages(
    groups: Sequence[Sequence[float]], settings: AdvantageSettings, *, batch: Sequence[Sequence[float]] | None = None
) -> list[Tensor]:
    """Return a float32 tensor `[G]` per group; with a group baseline, a group of one or of equal rewards gets zeros.

    If `groups` are one rank's share, `batch` holds the rewards of all groups; the std over the batch is taken of it.
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
    """Return the values `[R]` randomly permuted over the batch's sequences: a control run that must not learn."""
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
    """The settings for overlong answers: `limit` is the longest answer in tokens; without it none is overlong."""

    limit: int | None = None
    buffer: int = 0
    """Number of tokens before the limit over which the penalty grows from 0 to its full value."""
    penalty: float = 0.0
    """Amount subtracted from the reward at the limit; 0: none."""
    mask: bool = False
    """True if answers at the limit are left out of forward and denominators."""


def is_truncated(length: int, settings: OverlongSettings) -> bool:
    """Return True if an answer reached the limit; one that ended exactly there cannot be distinguished."""
    return settings.limit is not None and length >= settings.limit


def overlong_penalty(length: int, settings: OverlongSettings) -> float:
    """Return the value added to the reward of an answer of `length` tokens: 0 to -`penalty` (DAPO's equation 13)."""
    if settings.limit is None or not settings.penalty:
        return 0.0
    beyond = length - (settings.limit - settings.buffer)
    share = 1.0 if length >= settings.limit else 0.0 if beyond <= 0 else beyond / settings.buffer
    return -settings.penalty * share
