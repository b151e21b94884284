"""Evaluations of a run, read from `evals/`: accuracy by environment, or another metric where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from atropos_api.common import metric_names as names
from atropos_api.common.files import read_json_object

METRIC_PREFIX = "eval/"
Values = dict[str, list[tuple[int, float]]]
"""Step and value of each evaluation by environment, in the order of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """A metric of the first and of the last evaluation, as means over the same environments.

    They are those that were evaluated twice, or all if none was.
    """

    metric: str
    first: float
    last: float | None = None
    """None if no environment was evaluated twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    environment: str
    """The name "" is that of a single environment, because its evaluations are not in a folder of their own."""
    step: int
    content: Mapping[str, Any]


def read_accuracies(evals: Path) -> Values:
    """Return the accuracies in a run's folder of evaluations."""
    return _values_of(names.EVAL_ACCURACY, _read_evaluations(evals))


def read_held_out(evals: Path) -> HeldOutScore | None:
    """Return the accuracy; the reward where no environment reports one; else the first metric; None without any."""
    evaluations = _read_evaluations(evals)
    others = [metric for one in evaluations for metric in _metrics_in(one.content)]
    for metric in (names.EVAL_ACCURACY, names.EVAL_REWARD, *others):
        if values := list(_values_of(metric, evaluations).values()):
            repeated = [each for each in values if len(each) > 1]
            first = fmean(each[0][1] for each in repeated or values)
            last = fmean(each[-1][1] for each in repeated) if repeated else None
            return HeldOutScore(metric=metric, first=first, last=last)
    return None


def _read_evaluations(evals: Path) -> list[_Evaluation]:
    found = []
    for path in [*evals.glob("step-*/metrics.json"), *evals.glob("*/step-*/metrics.json")]:
        step = re.fullmatch(r"step-(\d+)", path.parent.name)
        if step is not None:
            environment = "" if path.parent.parent == evals else path.parent.parent.name
            found.append(_Evaluation(environment=environment, step=int(step[1]), content=read_json_object(path)))
    return sorted(found, key=lambda one: (one.environment, one.step))


def _values_of(metric: str, evaluations: Sequence[_Evaluation]) -> Values:
    values: Values = {}
    for one in evaluations:
        value = _find(one.content, metric)
        if value is not None:
            values.setdefault(one.environment, []).append((one.step, value))
    return values


def _metrics_in(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of an evaluation's metrics, from nested mappings too."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _metrics_in(value)
        elif name.startswith(METRIC_PREFIX) and isinstance(value, int | float):
            yield name


def _find(content: Any, name: str) -> float | None:
    """Return the first number called `name`, or the last part of `name`, anywhere in nested mappings."""
    if not isinstance(content, Mapping):
        return None
    for key in (name, name.rpartition("/")[2]):
        if isinstance(content.get(key), int | float):
            return float(content[key])
    return next((found for value in content.values() if (found := _find(value, name)) is not None), None)
