"""The verb `validate`: the environment's rewards tried on answers known to be right and wrong, without any model."""

from __future__ import annotations

import sys

from environments.rewards.gold import check_gold
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError


class GoldMissing(EnvironmentsError):
    """The environment offers nothing to check its rewards on."""


async def validate(env: BaseEnv) -> int:
    """Report pass or fail for every gold item; the exit code, 1 when any failed."""
    _require_hooks(type(env))
    await env.setup()
    count, failed = 0, []
    async for result in check_gold(env.gold_items(), env.score_answer, best=env.best_score):
        count += 1
        if result.passed:
            sys.stdout.write(f"pass  {result.name}\n")
        else:
            failed.append(result.name)
            sys.stdout.write(f"FAIL  {result.name}: {'; '.join(result.problems)}\n")
    if not count:
        raise GoldMissing(f"{type(env).__name__}.gold_items gave no item, so nothing was checked; give at least one")
    sys.stdout.write(f"{count - len(failed)} of {count} items passed\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _require_hooks(env_cls: type[BaseEnv]) -> None:
    for hook in ("gold_items", "score_answer"):
        if getattr(env_cls, hook) is getattr(BaseEnv, hook):
            raise GoldMissing(f"{env_cls.__name__} has no {hook}; validate needs gold_items and score_answer")
