"""Simulated time, tasks and network: everything that happens is an event with a time, drawn from one seed.

A task is a coroutine that waits for `sleep` and for answers of `Network.call`; the SDK's own coroutines can be awaited
in it. A call to the broker or its answer may come late, twice, or not at all.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities of what goes wrong, and how far clocks jump."""

    request_lost: float = 0.02
    answer_lost: float = 0.03
    doubled: float = 0.02
    late: float = 0.05
    """A call or an answer that takes seconds instead of milliseconds."""
    disk_fails: float = 0.006
    crash_at_failpoint: float = 0.0005
    seconds_between_kills: float = 12.0
    """Mean time between the kills of two processes."""
    zombie: float = 0.3
    """A process that is believed dead goes on next to its successor."""
    clock_jump_seconds: float = 2.0


class World:
    """The clock and the queue of events of one simulation."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self.events = 0
        self.skew_seconds = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._tasks: list[Task] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action))

    def run(self, events: int) -> None:
        """Run this many events, or fewer if none is left."""
        last = self.events + events
        while self.events < last and self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            self.events += 1
            action()

    def wall_clock(self) -> float:
        """The time that the broker's machine shows: it jumps now and then, back too. A broker reads it at its start."""
        return 1_700_000_000.0 + self.now + self.skew_seconds

    def steady_seconds(self) -> float:
        """The monotonic time of every machine."""
        return self.now

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    def start(self, work: Coroutine[Any, Any, None]) -> Task:
        self._tasks = [task for task in self._tasks if not task.ended]
        self._tasks.append(Task(self, work))
        return self._tasks[-1]

    def close(self) -> None:
        """End every task that still runs."""
        for task in self._tasks:
            task.kill()


@dataclass(frozen=True)
class Wait:
    """Something to await: `begin` gets the function to call with the result, once."""

    begin: Callable[[Callable[[Any], None]], None]

    def __await__(self) -> Generator[Wait, Any, Any]:
        return (yield self)


class Task:
    """A coroutine that runs in simulated time until it ends or is killed."""

    def __init__(self, world: World, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self.ended = False
        world.after(0.0, lambda: self._resume(None))

    def kill(self) -> None:
        self.ended = True
        self._work.close()

    def _resume(self, value: Any) -> None:
        if self.ended:
            return
        try:
            waited = self._work.send(value)
        except StopIteration:
            self.ended = True
            return
        waited.begin(self._resume)


def sleep(world: World, seconds: float) -> Wait:
    return Wait(lambda resume: world.after(seconds, lambda: resume(None)))


class ConnectionLost(Exception):
    """The caller's view of a call whose request or answer was lost: it cannot tell which."""


class Network:
    """Calls between clients and the broker."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call(self, serve: Callable[[], Any], *, timeout_seconds: float = 5.0) -> Wait:
        """Return a wait for the result of `serve`, an exception that it raised, or `ConnectionLost`."""
        return Wait(lambda resume: self._send(serve, resume, timeout_seconds))

    def _send(self, serve: Callable[[], Any], resume: Callable[[Any], None], timeout_seconds: float) -> None:
        world, faults = self._world, self._world.faults
        waiting = [True]

        def deliver(result: Any) -> None:
            if waiting[0]:
                waiting[0] = False
                resume(result)

        def arrive() -> None:
            try:
                result = serve()
            except Exception as error:  # every exception is the answer
                result = error
            if not isinstance(result, ConnectionLost) and not world.happens(faults.answer_lost):
                world.after(self._delay_seconds(), lambda: deliver(result))

        if not world.happens(faults.request_lost):
            world.after(self._delay_seconds(), arrive)
            if world.happens(faults.doubled):
                world.after(self._delay_seconds() * 3, arrive)
        world.after(timeout_seconds, lambda: deliver(ConnectionLost()))

    def _delay_seconds(self) -> float:
        late = self._world.happens(self._world.faults.late)
        return self._world.chance.uniform(0.5, 6.0) if late else self._world.chance.uniform(0.0005, 0.01)
