"""What an environment needs before its `setup`: places to write to, and the model's tokenizer, loaded once."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from environments.sdk.background import run_blocking
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError, TokenizerUnavailable
from environments.sdk.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


class PathUnusable(EnvironmentsError):
    """Nothing can be written where the configuration says."""


async def prepare(env: BaseEnv, *, needs_tokenizer: bool = True) -> None:
    """Find out at once what would fail hours later: the first group or result that cannot be written, a tokenizer."""
    config = env.config
    if config.data_path_to_save_groups is not None:
        _require_writable(Path(config.data_path_to_save_groups).parent, "--env.data_path_to_save_groups")
    if config.data_dir_to_save_evals is not None:
        _require_writable(Path(config.data_dir_to_save_evals), "--env.data_dir_to_save_evals")
    if needs_tokenizer:
        await prepare_tokenizer(env)
    if not env.evaluation_only:
        await env.check_servers()


def evaluates(env: BaseEnv) -> bool:
    """Whether the environment can evaluate; a line in the log where it is asked to and cannot."""
    config = env.config
    if not env.can_evaluate and (config.eval_at_start or config.eval_at_end or config.steps_per_eval > 0):
        logger.info("%s has no evaluate, so nothing is evaluated", type(env).__name__)
    return env.can_evaluate


def _require_writable(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PathUnusable(f"{flag}: nothing can be written into {folder} ({error.strerror}); name another") from error


async def prepare_tokenizer(env: BaseEnv) -> None:
    """Load the tokenizer that is named, or else that of the model which the inference server serves.

    Where every server speaks text alone and none is named there is none to load; whoever asks for it is told so.
    """
    if "tokenizer" in vars(env) or type(env).tokenizer is not BaseEnv.tokenizer:
        return  # the environment has one of its own
    name = env.config.tokenizer_name
    if name is not None:
        env.tokenizer = await _load(name)
        return
    told = await env.server.tokenizer_name()
    if told is None:
        return
    url, name = told
    logger.info("the tokenizer is that of the model at %s: %s", url, name)
    try:
        env.tokenizer = await _load(name)
    except TokenizerUnavailable as error:
        raise TokenizerUnavailable(f"{url} serves {name}: {error}") from error
    env.config.tokenizer_name = name


async def _load(name: str) -> Any:
    return await run_blocking(lambda: load_tokenizer(name), about=f"the tokenizer {name}")
