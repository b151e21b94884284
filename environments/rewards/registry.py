"""Rewards by name: those of this package, and those that installed packages offer as entry points.

A package offers a reward by an entry point in the group `atropos.rewards`; a reward that is not installed is named by
where it is, `module:attribute`. Classes are made with the parameters given; a plain function takes none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

from environments.rewards.combine import CombinedReward, Normalization, Part
from environments.rewards.errors import RewardUnknown, RewardUnusable
from environments.rewards.math_verifier import AnswerJudge
from environments.rewards.protocol import Reward

ENTRY_POINT_GROUP = "atropos.rewards"
BUILT_IN: Mapping[str, str] = {
    "accuracy": "environments.rewards.accuracy:AccuracyReward",
    "cosine": "environments.rewards.cosine:CosineScaledReward",
    "format": "environments.rewards.formats:FormatReward",
    "gsm8k": "environments.rewards.gsm8k:GSM8kReward",
    "length_linear": "environments.rewards.length:LinearLengthReward",
    "length_target": "environments.rewards.length:TargetLengthReward",
    "pairwise": "environments.rewards.pairwise:PairwiseReward",
    "pattern": "environments.rewards.formats:PatternReward",
    "r1_zero": "environments.rewards.r1_zero:R1ZeroReward",
    "repetition": "environments.rewards.repetition:RepetitionPenalty",
}

Spec = str | Mapping[str, Any]
"""A reward in a configuration: its name, or `{name, weight, params, label}` of which only the name is needed."""


def reward_names() -> list[str]:
    """Every name that `load_reward` knows."""
    return sorted({*BUILT_IN, *_entry_points()})


def load_reward(name: str) -> Any:
    """The class or function called `name`; a built-in name cannot be taken by another package."""
    target = BUILT_IN.get(name) or (name if ":" in name else _entry_points().get(name))
    if target is None:
        from atropos_api.common.cliconfig import nearest

        known = reward_names()
        raise RewardUnknown(
            f"no reward {name!r}{nearest(name, known)} known are {', '.join(known)}; or module:attribute"
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardUnknown(f"reward {name!r} cannot be loaded from {target}: {error}") from error


def make_reward(name: str, params: Mapping[str, Any] | None = None) -> Reward:
    """The reward called `name`, ready to be called with samples."""
    loaded = load_reward(name)
    if not inspect.isclass(loaded):
        if params:
            raise RewardUnusable(f"reward {name!r} is a function and takes no params, but {dict(params)} were given")
        return cast("Reward", loaded)
    try:
        return cast("Reward", loaded(**(params or {})))
    except TypeError as error:
        raise RewardUnusable(f"reward {name!r}: {error}; it takes {inspect.signature(loaded)}") from error


def combine(
    specs: Iterable[Spec], *, normalization: Normalization = "none", verifier: AnswerJudge | None = None
) -> CombinedReward:
    """A combination as a configuration names it; rewards that compare mathematics share one `verifier`."""
    return CombinedReward([_part(spec, verifier) for spec in specs], normalization)


def _part(spec: Spec, verifier: AnswerJudge | None) -> Part:
    fields: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    unknown = set(fields) - {"name", "weight", "params", "label"}
    if unknown or "name" not in fields:
        raise RewardUnusable(f"a reward is described by name, weight, params and label, not by {spec!r}")
    params = dict(fields.get("params") or {})
    if verifier is not None and _takes_verifier(load_reward(fields["name"])):
        params.setdefault("verifier", verifier)
    reward = make_reward(fields["name"], params)
    return Part(fields.get("label", fields["name"]), reward, float(fields.get("weight", 1.0)))


def _takes_verifier(loaded: Any) -> bool:
    return inspect.isclass(loaded) and "verifier" in inspect.signature(loaded).parameters


def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
