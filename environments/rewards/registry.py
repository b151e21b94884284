"""The registry of rewards finds one by its name: `make_reward("gsm8k")`.

A name is one of this package (`BUILT_IN`), of an entry point in the group `atropos.rewards`, by which installed
packages offer rewards, or `module:attribute`, where the module may also be a file (`rewards.py:polite`). A class is
instantiated with the parameters given; any other callable takes none.

A callable with TRL's signature is a reward too: `f(prompts, completions, **columns) -> list[float]`. Prompts and
completions are texts, or lists of messages if the data's prompts are chats, as in TRL; every column of the data is
passed as a list, and `completion_ids` has the sampled tokens. It may be async. A score of None means that the reward
does not apply to the sample; it adds 0, as in TRL's sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from atropos_api.common.files import expand_home
from atropos_api.common.import_path import import_file, import_own, searched
from environments.rewards.protocol import NO_SCORES, Reward, RewardUnknown, RewardUnusable, is_async

ENTRY_POINT_GROUP = "atropos.rewards"

BUILT_IN: Mapping[str, str] = {
    "accuracy": "environments.rewards.math:AccuracyReward",
    "cosine": "environments.rewards.math:CosineScaledReward",
    "format": "environments.rewards.text:FormatReward",
    "gsm8k": "environments.rewards.math:GSM8kReward",
    "length_linear": "environments.rewards.text:LinearLengthReward",
    "length_target": "environments.rewards.text:TargetLengthReward",
    "pairwise": "environments.rewards.pairwise:PairwiseReward",
    "pattern": "environments.rewards.text:PatternReward",
    "r1_zero": "environments.rewards.math:R1ZeroReward",
    "repetition": "environments.rewards.text:RepetitionPenalty",
}


def reward_names() -> list[str]:
    """Return every name that `load_reward` knows."""
    return sorted({*BUILT_IN, *_entry_points()})


def load_reward(name: str) -> Any:
    """Return the class or function called `name`; another package cannot replace a built-in name."""
    target = BUILT_IN.get(name) or (name if ":" in name else _entry_points().get(name))
    if target is None:
        from atropos_api.common.cliconfig import nearest

        known = reward_names()
        raise RewardUnknown(
            f"no reward {name!r}{nearest(name, known)} (known: {', '.join(known)}; or module:function, "
            "or file.py:function)"
        )
    module, _, attribute = target.rpartition(":")
    try:
        loaded = _load_file(module) if module.endswith(".py") else import_own(module)
        found = getattr(loaded, attribute, None)
    except Exception as error:  # a module may raise anything while it is loaded
        raise RewardUnknown(f"reward {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if found is None:
        offered = ", ".join(key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_"))
        raise RewardUnknown(
            f"reward {name!r} cannot be loaded: {module} has no {attribute!r}; it has {offered or 'none'}"
        )
    return found


def make_reward(name: str, params: Mapping[str, Any] | None = None) -> Reward:
    """Make the reward called `name`, ready to be called with samples."""
    reward = load_reward(name)
    if inspect.isclass(reward):
        reward = _instance(name, reward, params or {})
    elif params:
        raise RewardUnusable(f"reward {name!r} is not a class and takes no params, but {dict(params)} were given")
    if not callable(reward):
        raise RewardUnusable(
            f"reward {name!r} is a {type(reward).__name__}, which cannot be called; name a function, or a class whose "
            "instances can be called"
        )
    return TrlReward(reward) if has_trl_signature(reward) else cast("Reward", reward)


def _instance(name: str, made: Callable[..., Any], params: Mapping[str, Any]) -> Any:
    try:
        return made(**params)
    except TypeError as error:
        raise RewardUnusable(f"reward {name!r}: {error}; it takes {inspect.signature(made)}") from error


def _load_file(path: str) -> ModuleType:
    """Load a Python file as a module of its own; it can import the files next to it."""
    file = expand_home(path).absolute()
    with searched(file.parent):
        return import_file(file, f"atropos_reward_{file.stem}")


def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def has_trl_signature(function: Callable[..., Any]) -> bool:
    """Return True if the function takes `completions`, which the rewards of this package do not."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


class TrlReward:
    """A reward of this package that calls a function with TRL's signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self.__wrapped__ = function  # by which `inspect.unwrap` finds the user's code
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters}

    @property
    def is_async(self) -> bool:
        return is_async(self._function)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Iterable[float] | Awaitable[Iterable[float]]:
        names = dict.fromkeys(name for sample in samples for name in sample if name != "completion")
        arguments: dict[str, list[Any]] = {name: [sample.get(name) for sample in samples] for name in names}
        arguments["prompts"] = arguments.pop("prompt", [None] * len(samples))
        arguments["completions"] = [_completion(sample) for sample in samples]
        wanted = {name: values for name, values in arguments.items() if self._takes_all or name in self._names}
        returned = self._function(**wanted)
        return _awaited(returned) if inspect.isawaitable(returned) else _without_none(returned)


async def _awaited(returned: Awaitable[Any]) -> Any:
    return _without_none(await returned)


def _without_none(scores: Any) -> Any:
    """Replace None by 0 in a list of scores; anything else is returned as it is, for `score_samples`."""
    if isinstance(scores, NO_SCORES) or not isinstance(scores, Iterable):
        return scores
    return [0.0 if score is None else score for score in scores]


def _completion(sample: Mapping[str, Any]) -> Any:
    if isinstance(sample.get("prompt"), str | None):
        return sample["completion"]
    return [{"role": "assistant", "content": sample["completion"]}]
