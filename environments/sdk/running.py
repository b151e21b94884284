"""Runs one verb of an environment in an event loop: signals are heard, what was opened is closed, one error is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

import anyio

from atropos_api.common.errors import AtroposError
from atropos_api.common.token_file import TokenSource
from environments.sdk.errors import innermost
from environments.sdk.garbage import collect_rarely
from environments.sdk.stopping import StopRequest, listen_for_stop

if TYPE_CHECKING:
    from environments.sdk.env import BaseEnv

Verb = Literal["serve", "process", "evaluate", "validate"]

CLOSING_SECONDS = 10.0
"""How long files and the page of `process` may take after a signal."""


def run(verb: Verb, make_env: Callable[[], BaseEnv]) -> int:
    """Make the environment and do what the verb says; the exit code. Of errors together the first one is raised."""
    with listen_for_stop() as stop:
        env = make_env()

        async def run_and_close() -> int:
            try:
                return await _do(verb, env, stop)
            finally:
                await env.aclose()

        collect_rarely()
        try:
            return anyio.run(run_and_close, backend_options={"use_uvloop": True})
        except BaseExceptionGroup as errors:
            known = errors.subgroup(AtroposError)
            if known is None:
                raise
            raise innermost(known) from errors


async def _do(verb: Verb, env: BaseEnv, stop: StopRequest) -> int:
    from environments.sdk.evaluate import evaluate_alone
    from environments.sdk.process import process
    from environments.sdk.validate import validate

    if verb == "serve":
        await _serve(env, stop)
        return 0
    work = {"process": process, "evaluate": evaluate_alone, "validate": validate}[verb]
    return await _unless_stopped(work(env), stop)


async def _serve(env: BaseEnv, stop: StopRequest) -> None:
    from atropos_api.client import AsyncBrokerClient
    from environments.sdk.worker import EnvironmentWorker

    config = env.config
    token = TokenSource.settle(
        config.rollout_server_token,
        config.rollout_server_token_file,
        os.environ,
        flag="--env.rollout_server_token_file",
    )
    async with AsyncBrokerClient(config.rollout_server_url, token=token) as client:
        await EnvironmentWorker(env, client, stop).serve()


async def _unless_stopped(work: Coroutine[Any, Any, int | None], stop: StopRequest) -> int:
    """The exit code of `work`; a signal cancels it, and it has a little time to close its files."""
    stop.patience_seconds = CLOSING_SECONDS
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait_for(1))
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result() or 0
        task.cancel()
        await asyncio.wait({task})
        return stop.exit_code
    finally:
        stopped.cancel()
