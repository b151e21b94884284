"""One publish under way, as the fence keeps it: its lease, and what became of those that have ended.

A publish lives as long as its trainer shows signs of life. What it came to is remembered under its id, so that an
exchange whose answer was lost can be repeated: the answer is the same, and nothing happens twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from example_trainer.options.publish import InFlight
from example_trainer.serving.problems import Problem

Answer = dict[str, float]

_REMEMBERED = 64


class Change(Protocol):
    """New weights that the server itself has put in place of the old ones, which it can still put back."""

    async def keep(self) -> None:
        """The new weights are served: let go of the old ones."""

    async def take_back(self) -> bool:
        """Put the old weights back; whether they are whole again."""


class Lease:
    """A time that is begun anew with each sign of life; calls `on_lapse` once it has run out."""

    def __init__(self, seconds: float, on_lapse: Callable[[], None]) -> None:
        self.seconds = seconds
        self._on_lapse = on_lapse
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_seconds(self) -> float:
        """Until it runs out; the whole time where it has not begun."""
        if self._timer is None:
            return self.seconds
        return max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def begin(self) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._on_lapse)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True, eq=False)
class Publish:
    """One publish under way."""

    publish_id: str
    in_flight: InFlight
    lease: Lease
    door_closed_at: float
    begun: asyncio.Task[dict[str, object]] = field(init=False)
    """What answers `begin`; asked again, it gives the same answer."""
    standing: bool = False
    """Whether the engine has been paused for it."""
    recomputed_tokens: int = 0
    change: Change | None = None
    was_torn: bool = False
    """Whether the weights that `change` can put back are torn as well."""
    given_up: bool = False
    """Whether its trainer has aborted it or let its lease run out: it only waits for the engine to go on."""

    def answer(self, version: int) -> Answer:
        """What its end tells, once `version` is served."""
        return {
            "version": version,
            "recomputed_tokens": self.recomputed_tokens,
            "fence_seconds": time.monotonic() - self.door_closed_at,
        }

    def in_the_way(self) -> Problem:
        """The refusal of another publish beside this one."""
        seconds = self.lease.left_seconds
        detail = (
            f"publish {self.publish_id} has not ended; without a sign of its trainer it lapses in {seconds:.0f} s, "
            "and then another can begin"
        )
        return Problem(409, "publish-in-progress", detail, max(1, math.ceil(seconds)))


class PastPublishes:
    """What the newest publishes came to, by id: the answer of those that were served, nothing for the others."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, Answer | None] = OrderedDict()

    def __contains__(self, publish_id: object) -> bool:
        return publish_id in self._outcomes

    def remember(self, publish_id: str, outcome: Answer | None) -> None:
        self._outcomes[publish_id] = outcome
        while len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)

    def answer(self, publish_id: str) -> Answer | None:
        return self._outcomes.get(publish_id)


def lapsed(publish_id: str) -> Problem:
    detail = f"publish {publish_id} is not under way: its lease lapsed, or it has ended; begin a new one"
    return Problem(409, "publish-lapsed", detail)
