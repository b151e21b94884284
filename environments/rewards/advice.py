"""Two signs that rewards will train badly, said in words: scores far from zero, and scores that hardly differ."""

from __future__ import annotations

from collections.abc import Sequence

from environments.rewards.protocol import ScoreRange

LARGEST_SCORE = 5.0
SMALLEST_VARIANCE = 0.5


def reward_range_warning(scores: Sequence[float], *, limit: float = LARGEST_SCORE) -> str | None:
    """What to do about scores outside ±`limit`, or None when there are none."""
    outside = [float(score) for score in scores if abs(score) > limit]
    if not outside:
        return None
    worst = max(outside, key=abs)
    return (
        f"{len(outside)} of {len(scores)} scores lie outside ±{limit:g}, the furthest is {worst:g}; "
        f"large rewards slow convergence, so scale them into ±{limit:g}"
    )


def low_variance_hint(
    scores: Sequence[float], *, score_range: ScoreRange | None = None, threshold: float = SMALLEST_VARIANCE
) -> str | None:
    """What to do about scores that hardly differ, or None when they differ enough.

    With the reward's range, `threshold` is a share of the largest variance that range allows: rewards of 0 and 1 never
    exceed 0.25, so an absolute 0.5 would always complain about them.
    """
    if len(scores) < 2:
        return None
    mean = sum(scores) / len(scores)
    variance = float(sum((score - mean) ** 2 for score in scores) / len(scores))
    possible = 1.0 if score_range is None else ((score_range.high - score_range.low) / 2) ** 2
    if variance >= threshold * possible:
        return None
    return (
        f"the variance of {len(scores)} scores is {variance:.3g}, below {threshold * possible:.3g}: there is little to "
        "learn from; take larger groups, problems of middling difficulty, or pairwise relative rewards"
    )
