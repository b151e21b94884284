"""A trial calls a reward once, with one row and an empty completion, so that a mistake in it ends the start.

Only errors that prove a mistake are raised: a name, an attribute, an argument or a column that does not exist, and a
result that is no list of numbers. Any other error may come from the empty text, or from a judge that is not there yet,
so it is only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import anyio

from atropos_api.common.concurrency import Worker
from environments.rewards.failures import RewardFailed
from environments.rewards.protocol import (
    Reward,
    RewardUnusable,
    SampleIncomplete,
    ScoreNotFinite,
    reward_name,
    score_samples,
)

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 10.0
"""Time after which a trial is given up: a reward may wait for a judge."""


async def try_reward(reward: Reward, sample: Mapping[str, Any], *, worker: Worker | None = None) -> None:
    """Score `sample`, whose completion is empty; raise the error if it proves a mistake, else log it."""
    with anyio.move_on_after(TRIAL_SECONDS) as scope:
        try:
            await score_samples(reward, [sample], worker=worker)
        except Exception as error:
            if await _is_mistake(reward, sample, error, worker):
                logger.exception("the reward %s cannot be used", reward_name(reward), exc_info=error.__cause__ or error)
                raise
            logger.warning("an empty completion gets no score, which may be meant so: %s", error)
    if scope.cancelled_caught:
        logger.info("the reward %s was not tried: it took over %.0f s", reward_name(reward), TRIAL_SECONDS)


async def _is_mistake(reward: Reward, sample: Mapping[str, Any], error: Exception, worker: Worker | None) -> bool:
    if not isinstance(error, RewardFailed):
        return isinstance(error, RewardUnusable | SampleIncomplete) and not isinstance(error, ScoreNotFinite)
    cause = error.__cause__
    if isinstance(cause, KeyError):
        return await _lacks_column(reward, sample, cause, worker)
    if isinstance(cause, AttributeError | TypeError):
        return "NoneType" not in str(cause)  # a search in the empty text may have found nothing
    return isinstance(cause, NameError | ImportError)


async def _lacks_column(reward: Reward, sample: Mapping[str, Any], error: KeyError, worker: Worker | None) -> bool:
    """Return True if the key is that of a column: the error does not occur if the sample has one of this name."""
    key = error.args[0] if error.args else None
    if not isinstance(key, str) or key in sample:
        return False
    try:
        await score_samples(reward, [{**sample, key: ""}], worker=worker)
    except RewardFailed as failed:
        cause = failed.__cause__
        return not (isinstance(cause, KeyError) and cause.args == error.args)
    except Exception:  # noqa: BLE001 - any other error comes after the key was found
        return True
    return True
