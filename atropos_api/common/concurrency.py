"""Waiting in one event loop, and blocking work in threads.

`Condition` and `Notifier` wake waiters; `FairLock` is a lock granted in order of requests; `run_all` runs jobs at once.
`run_blocking` and `Worker` use daemon threads: anyio's and asyncio's worker threads are joined before a process exits,
so one that is retrying a download keeps the process alive for minutes after a request to stop; a daemon thread does
not.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import anyio


class Condition:
    """A condition variable without a lock: a change notifies it, and a waiter checks its condition after that."""

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def notify(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Return at the next notification. Nothing may be awaited between checking the condition and this call."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()


class Notifier:
    """Wakes every waiter at once, and costs nothing while there is none."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[bool]] = set()
        self.notifications = 0

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._waiters)

    def notify(self) -> None:
        self.notifications += 1
        for waiter in self._waiters:
            _settle(waiter, True)

    async def wait(self, timeout_seconds: float, *, until: asyncio.Future[None] | None = None) -> bool:
        """Return at the next notification (True), or after the timeout, or once `until` is done."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        # Not `asyncio.wait`: its sets and its extra future were a tenth of the cost of 1,000 waiting environments.
        end = functools.partial(_settle, waiter, False)
        timer = loop.call_later(timeout_seconds, end)
        if until is not None:
            until.add_done_callback(end)
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)
            timer.cancel()
            if until is not None:
                until.remove_done_callback(end)


def _settle(waiter: asyncio.Future[bool], notified: bool, *_: object) -> None:
    if not waiter.done():
        waiter.set_result(notified)


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
        late = time.monotonic() - self._next_line
        if late < 0:
            return False
        # One line for the time in which nobody asked, as in a long publish, not one for each ten seconds of it.
        self._next_line += WAIT_LINE_SECONDS * (1 + late // WAIT_LINE_SECONDS)
        return True


ResultT = TypeVar("ResultT")


async def run_all(jobs: Iterable[Callable[[], Awaitable[ResultT]]]) -> list[ResultT]:
    """Run all jobs at once and return their results in the order of the jobs."""
    results: dict[int, ResultT] = {}

    async def run(index: int, job: Callable[[], Awaitable[ResultT]]) -> None:
        results[index] = await job()

    async with anyio.create_task_group() as group:
        for index, job in enumerate(jobs):
            group.start_soon(run, index, job)
    return [results[index] for index in range(len(results))]


async def run_blocking(work: Callable[[], ResultT], *, about: str) -> ResultT:
    """Return the result of `work`, run in a thread; the log says every ten seconds what is waited for."""

    def start(run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=about, daemon=True).start()

    return await _run_elsewhere(work, start, about=about)


class Worker:
    """A thread for blocking calls of one kind: it makes them one after another, in the order in which they came."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], ResultT], *, about: str) -> ResultT:
        """Return the result of `work`; the log says every ten seconds what is waited for."""
        if self._thread is None:
            thread = threading.Thread(target=self._make_calls, name=about, daemon=True)
            thread.start()  # may fail, so it is stored only after that: calls to a thread not started would never end
            self._thread = thread
        return await _run_elsewhere(work, self._calls.put, about=about)

    def _make_calls(self) -> None:
        while True:
            self._calls.get()()


async def _run_elsewhere(
    work: Callable[[], ResultT], start: Callable[[Callable[[], None]], None], *, about: str
) -> ResultT:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[ResultT] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed: the result is no longer needed
            loop.call_soon_threadsafe(ended.set)

    start(run)
    wait = Wait()
    try:
        while True:
            with anyio.move_on_after(WAIT_LINE_SECONDS):
                await ended.wait()
                return outcome.result()
            logger.info("waiting for %s (%.0f s)", about, wait.seconds)
    finally:
        outcome.cancel()
