"""A condition without a lock, for one event loop: waiters wake at the next ring and look again.

Blocking work in a thread that nobody waits for who does not want its result any more.

anyio's and asyncio's worker threads are joined before a process ends, so one that hangs in retries of a download keeps
the process alive for minutes after it was told to stop; a daemon thread does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio


class Condition:
    """Whoever changes something others may wait for rings; whoever waits checks its condition after each ring."""

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def ring(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Return at the next ring. Nothing may be awaited between checking the condition and this call."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()


class Notifier:
    """Wakes everyone who waits, and costs nothing while nobody does."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_seconds: float, *, gone: asyncio.Future[None] | None = None) -> bool:
        """Return at the next ring (True), or after the timeout, or once `gone` is done."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        ends = (waiter,) if gone is None else (waiter, gone)
        try:
            done, _ = await asyncio.wait(ends, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            return waiter in done
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()


class FairLock:
    """One at a time, in the order of asking; while nobody has it, it is had without waiting."""

    def __init__(self) -> None:
        self._taken = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        """Take it if nobody has it."""
        had, self._taken = self._taken, True
        return not had

    async def take(self) -> None:
        if self.take_now():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # It was given just before its taker left.
                self.give_back()
            raise

    def give_back(self) -> None:
        """The next who waits has it from here on."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken = False


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
