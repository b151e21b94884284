"""Rewards for length: free up to a point and then less, or closest to a target."""

from __future__ import annotations

from typing import ClassVar

from environments.rewards.errors import RewardUnusable
from environments.rewards.protocol import Sample, SampleReward, ScoreRange
from environments.rewards.samples import LengthUnit, length_of


class LinearLengthReward(SampleReward):
    """1 for completions up to `free_length`, then falling in a straight line to 0 at `max_length` and beyond."""

    formula: ClassVar[str] = "min(1, max(0, (max_length - length) / (max_length - free_length)))"

    def __init__(self, max_length: int = 2048, free_length: int | None = None, *, unit: LengthUnit = "tokens") -> None:
        self.max_length = max_length
        self.free_length = max_length // 2 if free_length is None else free_length
        if not 0 <= self.free_length < max_length:
            raise RewardUnusable(f"free_length {self.free_length} must be at least 0 and below max_length {max_length}")
        self.unit = unit

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(0.0, 1.0)

    def score_sample(self, sample: Sample) -> float:
        left = (self.max_length - length_of(sample, self.unit)) / (self.max_length - self.free_length)
        return min(1.0, max(0.0, left))


class TargetLengthReward(SampleReward):
    """1 at `target`, falling in a straight line on either side to 0 at a distance of `tolerance`."""

    formula: ClassVar[str] = "max(0, 1 - abs(length - target) / tolerance)"

    def __init__(self, target: int = 512, tolerance: int | None = None, *, unit: LengthUnit = "tokens") -> None:
        self.target = target
        self.tolerance = target if tolerance is None else tolerance
        if target < 0 or self.tolerance <= 0:
            raise RewardUnusable(f"target {target} must be 0 or more and tolerance {self.tolerance} more than 0")
        self.unit = unit

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(0.0, 1.0)

    def score_sample(self, sample: Sample) -> float:
        return max(0.0, 1.0 - abs(length_of(sample, self.unit) - self.target) / self.tolerance)
