"""Runs an environment's evaluation: its requests marked as such, its results placed in the run."""

from __future__ import annotations

import logging
from pathlib import Path

import yaml

from atropos_api.common.private_files import write_private
from atropos_api.common.secret_fields import public_settings
from atropos_api.common.whole_files import FileInTheWay
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError
from environments.sdk.evaluation import holds_results
from environments.sdk.preparing import prepare
from environments.sdk.session.journal import keep_journal

logger = logging.getLogger(__name__)


class NoEvaluation(EnvironmentsError):
    """An evaluation was asked for by name of an environment that has none."""


async def run_evaluation(env: BaseEnv, *, step: int | None) -> None:
    """Evaluate once; `step` is the trainer step it belongs to, None outside a run."""
    env.evaluation_step = step
    with keep_journal("eval"):
        await env.evaluate()


async def evaluate_alone(env: BaseEnv) -> None:
    """The verb `evaluate`: set up, evaluate, done. `evaluation_only` spares an environment what it trains on."""
    if not env.can_evaluate:
        raise NoEvaluation(f"{type(env).__name__} has no evaluate; write one that calls self.evaluate_log")
    env.evaluation_only = True
    _require_free_folder(env)
    await prepare(env, needs_tokenizer=any(server.config.server_type != "openai" for server in env.server.servers))
    await env.setup()
    await env.setup_wandb()
    try:
        await run_evaluation(env, step=None)
    finally:
        if env.tracker is not None:
            env.tracker.finish()
    if env.config.data_dir_to_save_evals is not None:
        _save_config(env, Path(env.config.data_dir_to_save_evals))


def _require_free_folder(env: BaseEnv) -> None:
    folder = env.config.data_dir_to_save_evals
    if folder is not None and holds_results(Path(folder)) and not env.overwrite_results:
        raise FileInTheWay(
            f"{folder} holds the results of an evaluation, which stay as they are; name another "
            "--env.data_dir_to_save_evals, or let --overwrite replace them"
        )


def _save_config(env: BaseEnv, folder: Path) -> None:
    """Write beside the results what they were measured with; secrets stay out."""
    document = {
        "env": public_settings(env.config),
        "openai": [public_settings(server.config) for server in env.server.servers],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "evaluate_config.yaml", yaml.safe_dump(document, sort_keys=False))
