"""What an environment needs before its `setup`: the model's tokenizer, loaded once and beside the event loop."""

from __future__ import annotations

import logging
from typing import Any

from environments.sdk.background import run_blocking
from environments.sdk.env import BaseEnv
from environments.sdk.errors import TokenizerUnavailable
from environments.sdk.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


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
