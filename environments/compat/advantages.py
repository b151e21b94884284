"""`atroposlib.utils.advantages`: statistics of nested scores, discounted returns, and advantages step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "allclose_to_first",
    "compute_discounted_returns",
    "compute_grpo_process_supervision_advantages",
    "compute_stats",
]

Array = NDArray[Any]


def allclose_to_first(
    values: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False, return_vector: bool = False
) -> Any:
    """Whether every row is close to the first one; with `return_vector` that answer for each row."""
    rows = np.asarray(values)
    close = np.isclose(rows, rows[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    each = close.reshape(len(rows), -1).all(axis=1)
    return each if return_vector else bool(each.all())


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """Mean and variance of all numbers in lists within lists."""
    numbers = _flat(data)
    if not numbers:
        raise ValueError("no numbers to take statistics of")
    mean = math.fsum(numbers) / len(numbers)
    return {"mean": mean, "var": math.fsum((n - mean) ** 2 for n in numbers) / len(numbers)}


def compute_discounted_returns(rewards: Sequence[float] | Array, gamma: float) -> Array:
    """At each step the reward and all later ones, each step away worth `gamma` times as much."""
    given = np.asarray(rewards, dtype=None if isinstance(rewards, np.ndarray) else np.float32)
    returns = np.empty(given.shape, dtype=np.result_type(given.dtype, np.float32))
    total = 0.0
    for step in range(len(given) - 1, -1, -1):
        total = float(given[step]) + gamma * total
        returns[step] = total
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[Array]:
    """How each step's reward differs from all of them, added up from the step to the trajectory's end, or discounted.

    Shao et al., 2024, "DeepSeekMath", section 4.1.3.
    """
    stats = compute_stats(rewards)
    deviation = math.sqrt(stats["var"])
    if deviation < std_tol:
        raise ValueError(f"the rewards have a standard deviation of {deviation:g}, below {std_tol:g}: none is better")
    normalised = [(np.asarray(steps, dtype=float) - stats["mean"]) / deviation for steps in rewards]
    return [compute_discounted_returns(steps, 1.0 if gamma is None else gamma) for steps in normalised]


def _flat(data: Any) -> list[float]:
    return [n for part in data for n in _flat(part)] if isinstance(data, Sequence | np.ndarray) else [float(data)]
