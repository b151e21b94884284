"""Connection to an inference server that the trainer has not started, and the check that it fits the policy.

Programs are started in any order, so a server that does not answer yet is waited for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from example_trainer.errors import ServerRefused, ServerUnavailable, WrongDtype
from example_trainer.modeling.loading import name_of
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.client import NotYet, ServerClient, ServerInfo, ShouldStop, never, wait_for
from example_trainer.weight_protocol.manifest import given_token, read_token

logger = logging.getLogger(__name__)

T = TypeVar("T")


def until_it_answers(ask: Callable[[], T], url: str, *, timeout_seconds: float, should_stop: ShouldStop = never) -> T:
    """Call `ask` until the server at `url` answers it without an error; it may be starting, or starting again."""

    def poll() -> T:
        try:
            return ask()
        except (ServerRefused, ServerUnavailable) as error:
            raise NotYet(str(error)) from error

    what = f"the vLLM server at {url}"
    return wait_for(poll, what=what, timeout_seconds=timeout_seconds, should_stop=should_stop)


def named_token(token: str | None) -> str | None:
    """Return the bridge token that is given, or else that of the environment."""
    return given_token(token, os.environ)


def connect_server(url: str, token: str | None) -> tuple[ServerClient, ServerInfo]:
    """Return a client of the server at `url`, and what the server says of itself.

    Without a token, in `token` or the environment, the client takes the server's own from the file that it names.
    """
    named = named_token(token)
    client = ServerClient(url, named)
    try:
        info = client.info()
        if named is None and info.token_path and (found := read_token(info.token_path, url)):
            client.use_token(found)
    except BaseException:
        client.close()
        raise
    return client, info


def check_server(url: str, dtype: str | None, head_dtype: str | None, policy: Policy) -> None:
    """Raise `WrongDtype` if a server computes in another dtype than the policy; warn if its output head may round.

    A stock vLLM server names neither dtype.
    """
    wanted = name_of(policy.dtype)
    if dtype not in (None, wanted):
        raise WrongDtype(
            f"the vLLM server at {url} computes in {dtype}, the trainer in {wanted}, so their logprobs would differ; "
            f"start the server with --dtype {wanted}, or the trainer with --dtype {dtype}"
        )
    warn_of_rounding_head(url, head_dtype, policy)


def warn_of_rounding_head(url: str, head_dtype: str | None, policy: Policy) -> None:
    """Warn if a server does not say that its output head computes in fp32, as the trainer's does."""
    wanted = name_of(torch.float32)
    if policy.dtype == torch.float32 or head_dtype == wanted:
        return
    rounds = f"rounds the logits of its output head to {head_dtype}"
    state = "does not say in which dtype its output head computes" if head_dtype is None else rounds
    logger.warning(
        "the vLLM server at %s %s; the trainer keeps fp32 from the head on, and the server's logprobs may be further "
        'from the trainer\'s: start it with --head-dtype %s, a stock vLLM with --hf-overrides \'{"head_dtype":"%s"}\'',
        url,
        state,
        wanted,
        wanted,
    )
