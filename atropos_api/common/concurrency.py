"""Waiting in one event loop, and blocking work in threads.

`Condition` and `Notifier` wake waiters; `FairLock` is a lock granted in order of requests. `run_blocking` uses a daemon
thread: anyio's and asyncio's worker threads are joined before a process exits, so one that is retrying a download keeps
the process alive for minutes after a request to stop; a daemon thread does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio


class Condition:
    """A condition variable without a lock: a change rings it, and a waiter checks its condition after each ring."""

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
    """A notifier: it wakes every waiter, and costs nothing while there is none."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.notifications = 0

    def notify(self) -> None:
        self.notifications += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_seconds: float, *, until: asyncio.Future[None] | None = None) -> bool:
        """Return at the next notification (True), or after the timeout, or once `until` is done."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        ends = (waiter,) if until is None else (waiter, until)
        try:
            done, _ = await asyncio.wait(ends, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            return waiter in done
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()


class FairLock:
    """A lock with one holder at a time, granted in order of requests; taking a free one does not wait."""

    def __init__(self) -> None:
        self._taken = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def try_acquire(self) -> bool:
        """Take the lock if it is free; return True if that succeeded."""
        had, self._taken = self._taken, True
        return not had

    async def acquire(self) -> None:
        if self.try_acquire():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The lock was granted just before the waiter was cancelled.
                self.release()
            raise

    def release(self) -> None:
        """Release the lock; the next waiter, if there is one, holds it from now on."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken = False


logger = logging.getLogger(__name__)

WAIT_LINE_SECONDS = 10.0


class Wait:
    """A wait for something that another process provides: it has a limit, and a line for the log every ten seconds."""

    def __init__(self, timeout_seconds: float = math.inf) -> None:
        self.timeout_seconds = timeout_seconds
        self._started = time.monotonic()
        self._next_line = self._started + WAIT_LINE_SECONDS

    @property
    def seconds(self) -> float:
        """The time waited so far."""
        return time.monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """True once the limit is reached."""
        return self.seconds >= self.timeout_seconds

    def has_line(self) -> bool:
        """Return True if ten seconds have passed since the last line; the caller logs one then."""
        if time.monotonic() < self._next_line:
            return False
        self._next_line += WAIT_LINE_SECONDS
        return True


ResultT = TypeVar("ResultT")


async def run_blocking(work: Callable[[], ResultT], *, about: str) -> ResultT:
    """Return the result of `work`, run in a thread; the log says every ten seconds what is waited for."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[ResultT] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed: the result is no longer needed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name=about, daemon=True).start()
    waited = 0.0
    while True:
        with anyio.move_on_after(WAIT_LINE_SECONDS):
            await ended.wait()
            return outcome.result()
        waited += WAIT_LINE_SECONDS
        logger.info("waiting for %s (%.0f s)", about, waited)
