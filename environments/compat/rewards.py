"""`atroposlib.envs.reward_fns`: its base class, registry and combination, based on the rewards of this package.

Unlike in Atropos, an exception in a reward is an error: the rollout is tried again and not trained on with 0. The
weights of a combination's parts are applied. A name of `OURS` is this package's reward, which may score otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

__all__ = ["CombinedReward", "RewardFunction", "RewardRegistry", "registry"]

logger = logging.getLogger(__name__)

OURS: Mapping[str, str] = {
    "accuracy": "accuracy",
    "format": "format",
    "r1": "r1_zero",
    "repetition_penalty": "repetition",
}
GOLD_NAMES = ("ground_truth", "solution", "answer", "gold")
"""Arguments with the reference answers; as in Atropos, the first that is not None counts."""


class RewardFunction(ABC):
    """A reward over completions; calling it applies the weight."""

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self._name = name
        self.config = kwargs
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return a score for each completion, before the weight is applied."""

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [score * self.weight for score in self.compute(completions, **kwargs)]

    def set_wandb_logger(self, logger: Any) -> None:
        self.wandb_logger = logger

    @staticmethod
    def get_content(completion: Any) -> str:
        """Return the text of a completion: a string, a message, a choice with a message, or a chat's first answer."""
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            inner = completion.get("message", completion)
            return str(inner.get("content", "")) if inner.get("role") == "assistant" else ""
        turns = (RewardFunction.get_content(turn) for turn in completion or [] if isinstance(turn, Mapping))
        return next((text for text in turns if text), "")


class RewardRegistry:
    """Rewards by name: an environment's registered ones first, then those of this package."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[..., Any]] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Register a subclass of `RewardFunction`, as a decorator with or without a name."""

        def add(cls: Any) -> Any:
            self._known[name or cls.__name__.lower().removesuffix("reward")] = cls
            return cls

        return add if cls is None else add(cls)

    def register_function(self, name: str, function: Callable[..., Any]) -> None:
        self._known[name] = function

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """Make a reward from its name or from `{type, params, …}`."""
        config: dict[str, Any] = {"type": name_or_config} if isinstance(name_or_config, str) else dict(name_or_config)
        name = config.pop("type")
        found = self.get(name)
        options = {**kwargs, **config.pop("params", {}), **config}
        if name not in self._known:
            ignored = sorted(options.keys() - {"weight"})
            without = f" and takes no settings: ignored {', '.join(ignored)}" if ignored else ""
            logger.warning("the reward %s is this package's %s, not Atropos' own%s", name, OURS[name], without)
            options = {key: options[key] for key in options if key == "weight"}
        if inspect.isclass(found):
            return cast("RewardFunction", found(**options))
        return _Function(found, **options)

    def get(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if name in OURS:
            return as_function(OURS[name])
        raise KeyError(f"no reward {name!r}; known are {', '.join(self.list_registered())}")

    def list_registered(self) -> list[str]:
        return sorted({*self._known, *OURS})


class CombinedReward(RewardFunction):
    """The weighted sum of several rewards; `sum` divides it by the sum of weights, `minmax` scales it to 0 to 1."""

    def __init__(self, rewards: Iterable[Any], normalization: str = "none", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.normalization = normalization
        self.reward_functions = [registry.create(reward) for reward in rewards]

    @property
    def name(self) -> str:
        return f"combined({','.join(reward.name for reward in self.reward_functions)})"

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        columns = [reward(completions, **kwargs) for reward in self.reward_functions]
        totals = [sum(column) for column in zip(*columns, strict=True)]
        weights = sum(reward.weight for reward in self.reward_functions)
        if self.normalization == "sum" and weights > 0:
            return [total / weights for total in totals]
        if self.normalization == "minmax" and totals and max(totals) > min(totals):
            low, spread = min(totals), max(totals) - min(totals)
            return [(total - low) / spread for total in totals]
        return totals


class _Function(RewardFunction):
    """A plain function as a reward."""

    def __init__(self, function: Callable[..., Any], weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, name=getattr(function, "__name__", None))
        self._function = function
        self._options = kwargs

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        scores = self._function(completions, **{**self._options, **kwargs})
        # An array without a dimension has __iter__, and raises there.
        is_one = not isinstance(scores, Iterable) or getattr(scores, "ndim", 1) == 0
        return [float(score) for score in ([scores] * len(completions) if is_one else scores)]


def as_function(name: str) -> Callable[..., list[float]]:
    """Return one of this package's rewards as a function of completions and their reference answers."""

    @functools.cache
    def reward() -> Any:  # one for all calls: a process that compares answers takes a second to start
        from environments.rewards import make_reward

        return make_reward(name)

    def score(completions: Sequence[Any], **given: Any) -> list[float]:
        from environments.rewards import score_samples

        taken = {k: given.pop(k) for k in GOLD_NAMES if k in given}
        golds = next((value for value in taken.values() if value is not None), None)
        samples = [
            {"completion": RewardFunction.get_content(completion), "answer": _nth(golds, index)}
            for index, completion in enumerate(completions)
        ]
        with ThreadPoolExecutor(max_workers=1) as other:  # the calling thread already runs an event loop
            return other.submit(lambda: asyncio.run(score_samples(reward(), samples))).result()

    score.__name__ = name
    return score


def _nth(golds: Any, index: int) -> Any:
    return golds[index] if isinstance(golds, list | tuple) else golds


registry = RewardRegistry()
registry.register(CombinedReward, name="combined")
