"""Blocking work in a thread that nobody waits for who does not want its result any more.

anyio's and asyncio's worker threads are joined before a process ends, so one that hangs in retries of a download keeps
the process alive for minutes after it was told to stop; a daemon thread does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio

logger = logging.getLogger(__name__)

WAIT_LINE_SECONDS = 10.0

ResultT = TypeVar("ResultT")


async def run_blocking(work: Callable[[], ResultT], *, about: str) -> ResultT:
    """The result of `work`, which runs beside the event loop; the log says every ten seconds what is waited for."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[ResultT] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed: nobody wants the result any more
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name=about, daemon=True).start()
    waited = 0.0
    while True:
        with anyio.move_on_after(WAIT_LINE_SECONDS):
            await ended.wait()
            return outcome.result()
        waited += WAIT_LINE_SECONDS
        logger.info("waiting for %s (%.0f s)", about, waited)
