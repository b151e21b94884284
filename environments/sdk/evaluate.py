"""Runs an environment's evaluation: its requests marked as such, its results placed in the run."""

from __future__ import annotations

import logging

from environments.sdk.env import BaseEnv
from environments.sdk.session.journal import keep_journal

logger = logging.getLogger(__name__)


async def run_evaluation(env: BaseEnv, *, step: int | None) -> None:
    """Evaluate once; `step` is the trainer step it belongs to, None outside a run."""
    env.evaluation_step = step
    with keep_journal("eval"):
        await env.evaluate()


async def evaluate_alone(env: BaseEnv) -> None:
    """The verb `evaluate`: set up, evaluate, done. `evaluation_only` spares an environment what it trains on."""
    env.evaluation_only = True
    await env.setup()
    await run_evaluation(env, step=None)
