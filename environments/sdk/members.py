"""Collection of a group's members one by one, and the rule for those that are late or fail.

A group is as slow as its slowest rollout. The rule waits for it, draws the late members again, or closes the group
without them; `groups.fill_absent` then adds rows that no trainer learns from, so that batches keep their exact size.
Late members are usually long ones, so that closing and drawing again both train on shorter answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from environments.sdk.errors import EnvironmentsError, ItemDropped, contained, innermost
from environments.sdk.progress import collecting_member, note_attempt_done

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from environments.sdk.config import BaseEnvConfig, LateMembers
    from environments.sdk.groups import Item, ScoredDataItem
    from environments.sdk.rollout_metrics import RolloutMetrics

logger = logging.getLogger(__name__)

Member = tuple["ScoredDataItem | None", "list[Item]"]
"""A scored rollout, None if the environment gives none, and items to try next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRule:
    """The rule for a group's late members: they are late at `factor` times the time of the first `least` ones."""

    size: int
    late: LateMembers
    least: int
    factor: float
    draws: int
    """Number of times that a member is drawn under the rule `redraw`."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig) -> MemberRule:
        return cls(
            size=config.group_size,
            late=config.late_members,
            least=config.least_members_of(config.group_size),
            factor=config.late_factor,
            draws=config.rollout_attempts,
        )


class Members:
    """The members of one group while they are collected."""

    def __init__(
        self,
        collect: Callable[[], Awaitable[Member]],
        rule: MemberRule,
        counts: RolloutMetrics,
        *,
        item: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`collect` collects one member, `item` is named in log records."""
        self._collect = collect
        self._rule = rule
        self._counts = counts
        self._item = item
        self._clock = clock
        self._started = clock()
        self._done: dict[int, Member] = {}
        self._running: dict[int, anyio.CancelScope] = {}
        self._failed = 0
        self._changed = anyio.Event()

    async def collect(self) -> list[Member]:
        """Return the members in their order, without those that the rule has given up.

        Under `wait` the first error ends the group, as it does under every rule if other members would fail too.
        """
        async with anyio.create_task_group() as tasks:
            self._begin(tasks, range(self._rule.size))
            if self._rule.late != "wait":
                await self._until(self._rule.least)
                await self._end_late(tasks, allowed_seconds=self._rule.factor * (self._clock() - self._started))
        return [self._done[index] for index in sorted(self._done)]

    async def _end_late(self, tasks: TaskGroup, allowed_seconds: float) -> None:
        left = allowed_seconds - (self._clock() - self._started)
        for draw in range(1, self._rule.draws + 1):
            is_last = self._rule.late == "redraw" and draw == self._rule.draws
            with anyio.move_on_after(None if is_last else max(left, 0.0)):
                await self._until(self._rule.size)
            late = self._cancel_late(allowed_seconds)
            if not late or self._rule.late == "close":
                return
            self._counts.count_redrawn(len(late))
            self._begin(tasks, late)
            left = allowed_seconds

    def _cancel_late(self, allowed_seconds: float) -> Collection[int]:
        late = sorted(self._running)
        for index in late:
            logger.info(
                "rollout %d of %d of item %.100r is late after %.1f s: %s",
                index,
                self._rule.size,
                self._item,
                allowed_seconds,
                "the group is closed without it" if self._rule.late == "close" else "it is drawn again",
            )
            self._running.pop(index).cancel()
        return late

    def _begin(self, tasks: TaskGroup, indices: Iterable[int]) -> None:
        for index in indices:
            scope = self._running[index] = anyio.CancelScope()
            tasks.start_soon(self._run, index, scope)

    async def _run(self, index: int, scope: anyio.CancelScope) -> None:
        with scope, collecting_member(index):
            member = await self._attempts()
            if member is not None:
                self._done[index] = member
                note_attempt_done()
                if (next_draw := self._running.pop(index, scope)) is not scope:
                    next_draw.cancel()  # this one ended just as it was given up
        if self._running.get(index) is scope:  # a late member's place may have been taken by its next draw
            del self._running[index]
        self._changed.set()

    async def _attempts(self) -> Member | None:
        """Return a member; None if it failed and the group can be closed without it."""
        for draw in range(1, self._rule.draws + 1):
            try:
                with contained():
                    return await self._collect()
            except Exception as error:  # an environment's own code may raise anything
                reason = innermost(error)
                if self._ends_group(reason, is_last=draw == self._rule.draws):
                    raise
                logger.info("a rollout of item %.100r failed (%s: %s)", self._item, type(reason).__name__, reason)
                if self._rule.late == "close":
                    self._failed += 1
                    return None
                self._counts.count_redrawn(1)
        raise AssertionError("the last draw returns or raises")

    def _ends_group(self, error: BaseException, *, is_last: bool) -> bool:
        if isinstance(error, ItemDropped) or (isinstance(error, EnvironmentsError) and error.ends_server):
            return True
        if self._rule.late == "close":
            return self._rule.size - self._failed - 1 < self._rule.least
        return is_last or self._rule.late == "wait"

    async def _until(self, count: int) -> None:
        """Wait until `count` members are there, or all of them have ended."""
        while len(self._done) < count and self._running:
            self._changed = anyio.Event()
            await self._changed.wait()
