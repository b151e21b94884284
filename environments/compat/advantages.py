"""`atroposlib.utils.advantages`: statistics of nested scores, and discounted returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["compute_discounted_returns", "compute_stats"]


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """Mean and variance of all numbers in lists within lists."""
    numbers = _flat(data)
    if not numbers:
        raise ValueError("no numbers to take statistics of")
    mean = math.fsum(numbers) / len(numbers)
    return {"mean": mean, "var": math.fsum(n * n for n in numbers) / len(numbers) - mean * mean}


def compute_discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """At each step the reward and all later ones, each step away worth `gamma` times as much."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = float(reward) + gamma * total
        returns.append(total)
    return returns[::-1]


def _flat(data: Any) -> list[float]:
    return [n for part in data for n in _flat(part)] if isinstance(data, Sequence) else [float(data)]
