"""Several rewards as one: weighted, normalised or not, with each one's scores kept for the metrics.

combined = CombinedReward([Part("accuracy", AccuracyReward(), 1.0), Part("format", FormatReward(), 0.2)])
scores = await combined.score(samples)
scores.totals, scores.components["format"], scores.metrics()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from environments.rewards.errors import RewardUnusable
from environments.rewards.protocol import Reward, ScoreRange, range_of, score_samples

Normalization = Literal["none", "weights", "range"]
NORMALIZATIONS: tuple[Normalization, ...] = ("none", "weights", "range")


@dataclass(frozen=True, slots=True)
class Part:
    """A reward inside a combination: what its metrics are called, and how much it counts."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class CombinedScores:
    """The totals that are trained on, and every component as its reward gave it, before weight and normalisation."""

    totals: list[float]
    components: Mapping[str, list[float]]

    def metrics(self) -> dict[str, float]:
        """Mean and deviation of the total, and the mean of each component, by name."""
        count = max(len(self.totals), 1)
        mean = sum(self.totals) / count
        deviation = math.sqrt(sum((total - mean) ** 2 for total in self.totals) / count)
        means = {f"reward/{name}": sum(scores) / count for name, scores in self.components.items()}
        return {"reward/mean": mean, "reward/std": deviation, **means}


class CombinedReward:
    """The weighted sum of its parts, itself a reward.

    `normalization`: `none` adds weight times score; `weights` divides that by the sum of the weights' magnitudes;
    `range` first brings each part's score to 0..1 by the range it states, and then does the same as `weights`.
    """

    formula: ClassVar[str] = "sum of weight * score over the parts"

    def __init__(self, parts: Sequence[Part], normalization: Normalization = "none") -> None:
        if normalization not in NORMALIZATIONS:
            raise RewardUnusable(f"normalization {normalization!r} is unknown; use one of {', '.join(NORMALIZATIONS)}")
        names = [part.name for part in parts]
        if not parts or len(set(names)) != len(names):
            raise RewardUnusable(f"the parts {names} must be at least one, each with a name of its own")
        if normalization != "none" and not any(part.weight for part in parts):
            raise RewardUnusable(f"the weights of {names} are all 0, so nothing can be normalised by their sum")
        self.parts = tuple(parts)
        self.normalization = normalization
        self._ranges = [_finite_range(part) if normalization == "range" else None for part in parts]

    @property
    def range(self) -> ScoreRange | None:
        """What the parts' ranges allow; None when one of them states none."""
        low = high = 0.0
        for part in self.parts:
            stated = ScoreRange(0.0, 1.0) if self.normalization == "range" else range_of(part.reward)
            if stated is None:
                return None
            ends = sorted(part.weight * end for end in stated) if part.weight else (0.0, 0.0)
            low, high = low + ends[0], high + ends[1]
        return ScoreRange(low / self._divisor, high / self._divisor)

    async def __call__(self, samples: Sequence[Any]) -> list[float]:
        return (await self.score(samples)).totals

    async def score(self, samples: Sequence[Any]) -> CombinedScores:
        """Totals and components; the parts are called one after another."""
        components = {part.name: await score_samples(part.reward, samples) for part in self.parts}
        totals = [0.0] * len(samples)
        for part, stated in zip(self.parts, self._ranges, strict=True):
            for index, score in enumerate(components[part.name]):
                totals[index] += part.weight * _scaled(score, stated) / self._divisor
        return CombinedScores(totals, components)

    @property
    def _divisor(self) -> float:
        return 1.0 if self.normalization == "none" else sum(abs(part.weight) for part in self.parts)


def _finite_range(part: Part) -> ScoreRange:
    stated = range_of(part.reward)
    if stated is None or not all(map(math.isfinite, stated)) or stated.low == stated.high:
        raise RewardUnusable(
            f"reward {part.name!r} has the range {stated}, by which nothing can be scaled; use normalization=weights"
        )
    return stated


def _scaled(score: float, stated: ScoreRange | None) -> float:
    return score if stated is None else (score - stated.low) / (stated.high - stated.low)
