"""Scores from pairwise preferences: the win rate, or the strengths of a Bradley-Terry model.

Preferences are relative, so they still separate completions to which an absolute reward gives equal scores.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, ClassVar, Literal, TypeVar

from environments.rewards.protocol import RewardUnusable, Sample, ScoreRange

Wins = Sequence[Sequence[float]]
"""`wins[i][j]`: the number of times, or the share, with which i was preferred to j."""

ResultT = TypeVar("ResultT")

Judge = Callable[[Any, Any], float | Awaitable[float]]
"""A function that returns the share, 0 to 1, with which its first sample is preferred to its second; 0.5 is a tie."""

PRIOR_GAMES = 0.5
MAX_SWEEPS = 1000


def win_rates(wins: Wins) -> list[float]:
    """Return the share of its comparisons that each item won; 0.5 for an item that was never compared."""
    size = _require_square(wins)
    rates = []
    for index in range(size):
        won = sum(wins[index])
        played = won + sum(row[index] for row in wins)
        rates.append(won / played if played else 0.5)
    return rates


def bradley_terry(wins: Wins) -> list[float]:
    """Return log strengths of mean 0: sigmoid(s[i] - s[j]) is the probability that i is preferred to j.

    Bradley and Terry, "Rank analysis of incomplete block designs" (1952), fitted by Hunter's MM algorithm (2004).
    Half a tie is added to every pair; without it a sample that never lost would be infinitely strong.
    """
    size = _require_square(wins)
    games = [[float(wins[i][j] + wins[j][i]) + PRIOR_GAMES * (i != j) for j in range(size)] for i in range(size)]
    won = [sum(row) - row[i] + PRIOR_GAMES / 2 * (size - 1) for i, row in enumerate(wins)]
    strengths = [1.0] * size
    for _ in range(MAX_SWEEPS):
        updated = [
            won[i] / sum(games[i][j] / (strengths[i] + strengths[j]) for j in range(size) if j != i)
            if size > 1
            else 1.0
            for i in range(size)
        ]
        center = math.exp(sum(map(math.log, updated)) / max(size, 1))
        updated = [strength / center for strength in updated]
        settled = all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(strengths, updated, strict=True))
        strengths = updated
        if settled:
            break
    return [math.log(strength) for strength in strengths]


class PairwiseReward:
    """Compares each sample with all others of its prompt by `judge`; the score is the `win_rate` or `bradley_terry`
    strength.

    An async judge is asked about all pairs at once, so it must limit its own requests. `both_orders` asks about each
    pair in both orders and takes the mean, since judge models tend to prefer one position.
    """

    formula: ClassVar[str] = (
        "win_rate: comparisons won / comparisons; bradley_terry: log strength, mean 0 over the prompt"
    )

    def __init__(
        self, judge: Judge, method: Literal["win_rate", "bradley_terry"] = "win_rate", *, both_orders: bool = False
    ) -> None:
        if method not in {"win_rate", "bradley_terry"}:
            raise RewardUnusable(f"method {method!r} is unknown; use win_rate or bradley_terry")
        self.judge = judge
        self.method = method
        self.both_orders = both_orders

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(0.0, 1.0) if self.method == "win_rate" else ScoreRange(-math.inf, math.inf)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        scores = [0.0] * len(samples)
        groups = list(_by_prompt(samples).values())
        compared = await _gathered(self._compare([samples[index] for index in members]) for members in groups)
        for members, wins in zip(groups, compared, strict=True):
            strengths = win_rates(wins) if self.method == "win_rate" else bradley_terry(wins)
            for index, strength in zip(members, strengths, strict=True):
                scores[index] = strength
        return scores

    async def _compare(self, samples: Sequence[Sample]) -> list[list[float]]:
        wins = [[0.0] * len(samples) for _ in samples]
        pairs = list(combinations(range(len(samples)), 2))
        shares = await _gathered(self._share(samples[left], samples[right]) for left, right in pairs)
        for (left, right), share in zip(pairs, shares, strict=True):
            wins[left][right], wins[right][left] = share, 1.0 - share
        return wins

    async def _share(self, left: Sample, right: Sample) -> float:
        """Return the share with which `left` is preferred to `right`."""
        share = await self._ask(left, right)
        return (share + 1.0 - await self._ask(right, left)) / 2 if self.both_orders else share

    async def _ask(self, first: Sample, second: Sample) -> float:
        verdict = self.judge(first, second)
        share = float(await verdict if inspect.isawaitable(verdict) else verdict)
        if not 0.0 <= share <= 1.0:
            raise RewardUnusable(f"the judge answered {share}; it must answer a share between 0 and 1")
        return share


async def _gathered(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return all results; the first error ends the other calls, whose answers nobody would read."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _by_prompt(samples: Sequence[Sample]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        prompt = None if isinstance(sample, str) else repr(sample.get("prompt"))
        groups.setdefault(prompt, []).append(index)
    return groups


def _require_square(wins: Wins) -> int:
    size = len(wins)
    if any(len(row) != size for row in wins):
        raise RewardUnusable(f"wins has {size} rows but not {size} columns in each; give wins[i][j] for every pair")
    return size
