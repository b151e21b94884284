"""The state of one publish for the fence: its lease, and the outcomes of publishes that have ended.

A publish stays valid as long as its trainer renews the lease. Its outcome is stored under its id, so that an exchange
whose answer was lost can be repeated: the answer is the same, and nothing is done twice.
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
from example_trainer.serving.drain import DrainPlan
from example_trainer.serving.problems import Problem

Answer = dict[str, float]

_REMEMBERED = 64


class ReversibleUpdate(Protocol):
    """New weights that the server itself has put in place of the old ones, which it can still restore."""

    async def keep(self) -> None:
        """Discard the old weights: the new ones are served."""

    async def restore(self) -> bool:
        """Restore the old weights; return True if they are whole again."""


class Lease:
    """A time limit that each renewal restarts; calls `on_lapse` once it has run out."""

    def __init__(self, seconds: float, on_lapse: Callable[[], None]) -> None:
        self.seconds = seconds
        self._on_lapse = on_lapse
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_seconds(self) -> float:
        """Time until it runs out; the whole time if it has not begun."""
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
    gate_closed_at: float
    begun: asyncio.Task[dict[str, object]] = field(init=False)
    """The task whose result answers `begin`; a repeated call gets the same answer."""
    engine_paused: bool = False
    """True once the engine has been paused for it."""
    recomputed_tokens: int = 0
    expected_loss_seconds: float = 0.0
    loss_seconds: float = 0.0
    """Generation time that draining and recomputing cost, if `auto` chose between them."""
    update: ReversibleUpdate | None = None
    was_torn: bool = False
    """True if the weights that `update` can restore are also partly overwritten."""
    restoring: bool = False
    """True while an abort restores the weights: no other publish may begin, which would change them too."""
    abandoned: bool = False
    """True after an abort, a lapse or a failed pause of the engine: it only waits for the engine to resume."""

    def note_pause(self, discarded_tokens: int, plan: DrainPlan | None, idle_seconds: float) -> None:
        """Note the cost of the engine's pause; `idle_seconds` is the wait, weighted by the share of ended requests."""
        self.engine_paused, self.recomputed_tokens = True, discarded_tokens
        if plan is not None:
            self.expected_loss_seconds = plan.expected_loss_seconds
            self.loss_seconds = plan.loss_seconds(idle_seconds, discarded_tokens)

    def answer(self, version: int) -> Answer:
        """Return the answer to the call that ends the publish, now that `version` is served."""
        return {
            "version": version,
            "recomputed_tokens": self.recomputed_tokens,
            "fence_seconds": time.monotonic() - self.gate_closed_at,
            "expected_loss_seconds": self.expected_loss_seconds,
            "loss_seconds": self.loss_seconds,
        }

    def refusal_of_others(self) -> Problem:
        """Return the refusal of another publish during this one."""
        seconds = self.lease.left_seconds
        detail = (
            f"publish {self.publish_id} is under way; unless its trainer renews it, it lapses in {seconds:.0f} s, "
            "and then another can begin"
        )
        return Problem(409, "publish-in-progress", detail, max(1, math.ceil(seconds)))


class PastPublishes:
    """The outcomes of the newest publishes, by id: the answer for those that were served, None for the others."""

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
