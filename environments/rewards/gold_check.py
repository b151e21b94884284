"""The module checks a reward before and during training.

`check_gold` and `check_reward` score answers known to be right and wrong. A reward that does not give its best score
to a right answer, or gives it to a wrong one, trains the wrong thing without any error; causes are a wrong reference,
a parser that misses a form, or a mistyped key. `reward_range_warning` and `low_variance_hint` describe two signs that
rewards will train badly: scores far from zero, and scores that hardly differ.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from environments.rewards.protocol import Reward, RewardUnusable, ScoreRange, range_of, score_samples

ScoreAnswer = Callable[[Any, str], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class GoldItem:
    """An item, a completion that must earn the best score, and completions that must not."""

    item: Any
    right: str
    wrong: Sequence[str] = ("",)
    name: str = ""


@dataclass(frozen=True, slots=True)
class GoldResult:
    """The result of one item; it passed if there are no problems."""

    name: str
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


async def check_gold(items: Iterable[GoldItem], score: ScoreAnswer, *, best: float) -> AsyncIterator[GoldResult]:
    """Score every item's right and wrong completions; an exception while scoring is a problem of that item."""
    for number, gold in enumerate(items, 1):
        name = gold.name or f"item {number}"
        problems = [await _problem(gold.item, gold.right, score, best=best, is_right=True)]
        wrongs = (gold.wrong,) if isinstance(gold.wrong, str) else gold.wrong  # its letters would be tried
        problems += [await _problem(gold.item, wrong, score, best=best, is_right=False) for wrong in wrongs]
        yield GoldResult(name, tuple(filter(None, problems)))


async def check_reward(reward: Reward, items: Iterable[GoldItem], *, best: float | None = None) -> list[GoldResult]:
    """Run `check_gold` on a reward: an `item` is a sample without completion; `best` defaults to the highest score."""
    stated = range_of(reward)
    top = best if best is not None else stated.high if stated else math.inf
    if not math.isfinite(top):
        raise RewardUnusable("the best score is unknown; give best= or a reward with a finite range")

    async def score(item: Any, text: str) -> float:
        return (await score_samples(reward, [{**item, "completion": text}]))[0]

    return [result async for result in check_gold(items, score, best=top)]


async def _problem(item: Any, text: str, score: ScoreAnswer, *, best: float, is_right: bool) -> str | None:
    kind = "right" if is_right else "wrong"
    try:
        earned = score(item, text)
        value = float(await earned if inspect.isawaitable(earned) else earned)
    except Exception as error:  # noqa: BLE001 - users' code may raise anything; it is reported, never raised
        return f"the {kind} answer {_shown(text)} raised {type(error).__name__}: {error}"
    if is_right and not math.isclose(value, best, rel_tol=1e-6, abs_tol=1e-9):
        return f"the right answer {_shown(text)} earns {value:g}, not {best:g}"
    if not is_right and value >= best:
        return f"the wrong answer {_shown(text)} earns {value:g} like a right one"
    return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"…{text[-60:]}")


LARGEST_SCORE = 5.0
SMALLEST_VARIANCE = 0.5


def reward_range_warning(scores: Sequence[float], *, limit: float = LARGEST_SCORE) -> str | None:
    """Return advice about scores outside ±`limit`; None when there are none."""
    outside = [float(score) for score in scores if abs(score) > limit]
    if not outside:
        return None
    worst = max(outside, key=abs)
    return (
        f"{len(outside)} of {len(scores)} scores are outside ±{limit:g}, the furthest is {worst:g}; "
        f"large rewards slow convergence, so scale them into ±{limit:g}"
    )


def low_variance_hint(
    scores: Sequence[float], *, score_range: ScoreRange | None = None, threshold: float = SMALLEST_VARIANCE
) -> str | None:
    """Return advice about scores that hardly differ; None when they differ enough.

    `threshold` is a share of the largest variance that the reward's range allows; without a finite range, scores
    within 0 and 1 are taken to have that one. Scores of 0 and 1 need only differ at all: their variance says nothing
    but how many are right.
    """
    if len(scores) < 2 or set(scores) == {0.0, 1.0}:
        return None
    if score_range is not None and not all(map(math.isfinite, score_range)):
        score_range = None
    if score_range is None and all(0.0 <= score <= 1.0 for score in scores):
        score_range = ScoreRange(0.0, 1.0)
    mean = sum(scores) / len(scores)
    variance = float(sum((score - mean) ** 2 for score in scores) / len(scores))
    possible = 1.0 if score_range is None else ((score_range.high - score_range.low) / 2) ** 2
    if variance >= threshold * possible:
        return None
    return (
        f"the variance of {len(scores)} scores is {variance:.3g}, below {threshold * possible:.3g}: there is little to "
        "learn from; take larger groups, problems of middling difficulty, or pairwise relative rewards"
    )
