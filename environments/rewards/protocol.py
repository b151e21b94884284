"""What a reward is: a callable from samples to scores, one score a sample, plain or async.

    def ends_properly(samples):
        return [float(sample["completion"].rstrip().endswith(".")) for sample in samples]

Samples are mappings with at least `completion`; scores may come back as a list, a tuple or a numpy array. Rewards of
this package also have a `range`, so that others can normalise them and tell when the best score was reached.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from environments.rewards.errors import RewardUnusable

Sample = Mapping[str, Any] | str
"""`prompt`, `completion` and whatever else the data has (`answer`, `token_count`, …); text alone is a completion."""


class Reward(Protocol):
    """Anything that scores a batch of samples; a plain function does."""

    def __call__(self, samples: Sequence[Any], /) -> Iterable[float] | Awaitable[Iterable[float]]: ...


class ScoreRange(NamedTuple):
    """The lowest and the highest score a reward can give, both included; infinite ones are never reached."""

    low: float
    high: float

    def __str__(self) -> str:
        left = "[" if math.isfinite(self.low) else "("
        right = "]" if math.isfinite(self.high) else ")"
        return f"{left}{self.low:g}, {self.high:g}{right}"


class SampleReward(ABC):
    """A reward that looks at one sample at a time and needs no waiting."""

    formula: ClassVar[str]

    @property
    @abstractmethod
    def range(self) -> ScoreRange:
        """The scores this reward can give."""

    @abstractmethod
    def score_sample(self, sample: Sample) -> float:
        """The score of one sample."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.score_sample(sample) for sample in samples]


async def score_samples(reward: Reward, samples: Sequence[Any]) -> list[float]:
    """Call a reward of either kind and check what came back: one finite number for each sample."""
    returned = reward(samples)
    values = await returned if inspect.isawaitable(returned) else returned
    try:
        scores = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise RewardUnusable(f"{reward_name(reward)} returned {values!r:.120}; return one number a sample") from error
    if len(scores) != len(samples):
        raise RewardUnusable(f"{reward_name(reward)} returned {len(scores)} scores for {len(samples)} samples")
    bad = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        raise RewardUnusable(f"{reward_name(reward)} scored sample {bad} with {scores[bad]}; scores must be finite")
    return scores


def range_of(reward: Reward) -> ScoreRange | None:
    """The range a reward states, or None for one that states none."""
    stated = getattr(reward, "range", None)
    return ScoreRange(*stated) if stated is not None else None


def reward_name(reward: Reward) -> str:
    return getattr(reward, "__name__", None) or type(reward).__name__
