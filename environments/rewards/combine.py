"""Several rewards are combined into one by weights; `RewardManager` scores a run with it.

parts = [WeightedReward("accuracy", AccuracyReward(), 1.0), WeightedReward("format", FormatReward(), 0.2)]
scores = await CombinedReward(parts).score(samples)
scores.totals, scores.components["format"], scores.metrics()

manager = RewardManager(combine(["gsm8k", {"name": "repetition", "weight": 0.2}]))
scores = await manager.score(samples)
metrics = manager.metrics()
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atropos_api.common import metric_names
from atropos_api.common.concurrency import Worker
from environments.rewards.gold_check import low_variance_hint, reward_range_warning
from environments.rewards.math_verifier import AnswerJudge
from environments.rewards.protocol import (
    Reward,
    RewardUnusable,
    ScoreRange,
    range_of,
    reward_name,
    score_samples,
)
from environments.rewards.registry import load_reward, make_reward
from environments.rewards.trial import try_reward

Normalization = Literal["none", "weights", "range"]


class RewardSpec(BaseModel):
    """A reward in a configuration: its name, or `{name, weight, params, label}`, also as JSON text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weight: float = Field(1.0, allow_inf_nan=False)
    params: dict[str, Any] = {}
    label: str | None = None
    """Name of the reward in the metrics; if unset, the function's name."""

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            return {"name": value}
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"a reward is a name or a JSON object, and this is no JSON ({error})") from error
        unknown = [key for key in read if key not in cls.model_fields] if isinstance(read, Mapping) else []
        if unknown:
            from atropos_api.common.cliconfig import nearest

            known = ", ".join(cls.model_fields)
            raise ValueError(f"unknown key {unknown[0]!r}{nearest(str(unknown[0]), cls.model_fields)} (keys: {known})")
        return read

    def __str__(self) -> str:
        return self.name

    @property
    def needs_reference(self) -> bool:
        """True if it is a built-in reward that compares with a reference; False for a user's own function."""
        return ":" not in self.name and bool(getattr(load_reward(self.name), "needs_reference", False))

    @property
    def shown_name(self) -> str:
        """The name in the metrics: `polite` for `rewards.py:polite`."""
        return self.label or self.name.rpartition(":")[2]


Spec = str | Mapping[str, Any] | RewardSpec

NORMALIZATIONS: tuple[Normalization, ...] = ("none", "weights", "range")


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward inside a combination: its name in the metrics, and its weight."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class CombinedScores:
    """The totals that are trained on, and the scores of each component before weight and normalisation."""

    totals: list[float]
    components: Mapping[str, list[float]]

    def metrics(self) -> dict[str, float]:
        """Return mean and standard deviation of the total, and the mean of each component."""
        count = max(len(self.totals), 1)
        mean = sum(self.totals) / count
        deviation = math.sqrt(sum((total - mean) ** 2 for total in self.totals) / count)
        means = {f"reward/{name}": sum(scores) / count for name, scores in self.components.items()}
        return {metric_names.REWARD_MEAN: mean, metric_names.REWARD_STD: deviation, **means}


class CombinedReward:
    """A combined reward is the weighted sum of its parts.

    `normalization`: `none` adds weight times score; `weights` divides that by the sum of the weights' magnitudes;
    `range` first brings each part's score to 0..1 by the range it states, and then does the same as `weights`.
    """

    formula: ClassVar[str] = "sum of weight * score over the parts"

    def __init__(self, parts: Sequence[WeightedReward], normalization: Normalization = "none") -> None:
        if normalization not in NORMALIZATIONS:
            raise RewardUnusable(f"normalization {normalization!r} is unknown; use one of {', '.join(NORMALIZATIONS)}")
        names = [part.name for part in parts]
        if not parts:
            raise RewardUnusable("no reward is named; name at least one")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise RewardUnusable(f"two rewards are called {repeated[0]!r} in the metrics; give one another label")
        if normalization != "none" and not any(part.weight for part in parts):
            raise RewardUnusable(
                f"the weights of {names} are all 0, so nothing can be normalised by their sum; set one, or "
                "normalization=none"
            )
        self.parts = tuple(parts)
        self.normalization = normalization
        self._worker = Worker()
        self._ranges = [_finite_range(part) if normalization == "range" else None for part in parts]

    @property
    def range(self) -> ScoreRange | None:
        """The range that follows from the parts' ranges; None if a part states no range."""
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
        """Return totals and components; the parts are called one after another."""
        components = {part.name: await score_samples(part.reward, samples, worker=self._worker) for part in self.parts}
        totals = [0.0] * len(samples)
        for part, stated in zip(self.parts, self._ranges, strict=True):
            for index, score in enumerate(components[part.name]):
                totals[index] += part.weight * _scaled(score, stated) / self._divisor
        return CombinedScores(totals, components)

    async def try_on(self, sample: Mapping[str, Any]) -> None:
        """Call each part once with a sample whose completion is empty; raise if the error is certainly a mistake."""
        for part in self.parts:
            await try_reward(part.reward, sample, worker=self._worker)

    @property
    def _divisor(self) -> float:
        return 1.0 if self.normalization == "none" else sum(abs(part.weight) for part in self.parts)


def _finite_range(part: WeightedReward) -> ScoreRange:
    stated = range_of(part.reward)
    if stated is None or not all(map(math.isfinite, stated)) or stated.low == stated.high:
        raise RewardUnusable(
            f"reward {part.name!r} has the range {stated}, by which nothing can be scaled; use normalization=weights"
        )
    return stated


def _scaled(score: float, stated: ScoreRange | None) -> float:
    return score if stated is None else (score - stated.low) / (stated.high - stated.low)


logger = logging.getLogger(__name__)

KEPT_SCORES: Final = 65_536
"""Newest scores that are kept: no metrics are asked for as long as each group of an environment is dropped."""


class RewardManager:
    """Scores with `reward` and keeps the scores, or the newest of very many, until `metrics` is called."""

    def __init__(self, reward: Reward) -> None:
        if not isinstance(reward, CombinedReward):
            reward = CombinedReward([WeightedReward(reward_name(reward), reward)])
        self.reward = reward
        self._totals: deque[float] = deque(maxlen=KEPT_SCORES)
        self._components: dict[str, deque[float]] = {}
        self._advised: set[str] = set()

    async def score(self, samples: Sequence[Any]) -> list[float]:
        """Return the scores to train on, in the order of the samples."""
        scores = await self.reward.score(samples)
        self._totals += scores.totals
        for name, values in scores.components.items():
            self._components.setdefault(name, deque(maxlen=KEPT_SCORES)).extend(values)
        return scores.totals

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the scores since the last call, and forget these; empty when there were none."""
        totals, components = list(self._totals), {name: list(values) for name, values in self._components.items()}
        self._totals.clear()
        self._components.clear()
        if not totals:
            return {}
        self._advise(totals)
        return CombinedScores(totals, components).metrics()

    def _advise(self, totals: Sequence[float]) -> None:
        """Log each kind of advice once only, since it concerns the reward and not a step."""
        advice = {
            "range": reward_range_warning(totals),
            "variance": low_variance_hint(totals, score_range=range_of(self.reward)),
        }
        for kind, text in advice.items():
            if text is not None and kind not in self._advised:
                self._advised.add(kind)
                logger.warning("%s", text)


def combine(
    specs: Iterable[Spec], *, normalization: Normalization = "none", verifier: AnswerJudge | None = None
) -> CombinedReward:
    """Make a combination from its configuration; rewards that compare mathematics share one `verifier`."""
    return CombinedReward([_part(spec, verifier) for spec in specs], normalization)


def _part(spec: Spec, verifier: AnswerJudge | None) -> WeightedReward:
    try:
        read = RewardSpec.model_validate(spec)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "reward"
        raise RewardUnusable(
            f"a reward is described by name, weight, params and label, not by {spec!r}: {place}: {problem['msg']}"
        ) from None
    params = dict(read.params)
    if verifier is not None and _takes_verifier(load_reward(read.name)):
        params.setdefault("verifier", verifier)
    return WeightedReward(read.shown_name, make_reward(read.name, params), read.weight)


def _takes_verifier(loaded: Any) -> bool:
    return inspect.isclass(loaded) and "verifier" in inspect.signature(loaded).parameters
