"""One item's rollout, from collection to delivery: collected, postprocessed and delivered, or given up with a report.

`RolloutRunner` collects items and tries failed ones again. A rollout sends all its groups at its end or none of them,
so that one that is tried again after an error sends nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import anyio

from atropos_api.common.tracing import Span, running
from environments.sdk.environment import Environment
from environments.sdk.errors import (
    EnvironmentsError,
    ItemDropped,
    RolloutsKeepFailing,
    RolloutTimedOut,
    contained,
    describe_error,
    innermost,
)
from environments.sdk.groups import Item, as_items
from environments.sdk.reporting import FAILED, NO_GROUP, TIMED_OUT, Rejection, one_line, quoted
from environments.sdk.runtime.delivery import Buffer, Delivery, buffer_groups
from environments.sdk.runtime.items import GroupKey, ItemLeases, LeasedItem
from environments.sdk.session.tokens_and_masks import record_samples

logger = logging.getLogger(__name__)

NO_ITEM = "no-item"
"""Reason of a number for which the environment has no item."""
EMPTY_ITEM_PAUSE_SECONDS = 0.01
CANCELLATION_SECONDS = 60.0
"""Time that a cancelled rollout may take to end: code of an environment may clean up, or ignore the cancellation."""

CLEANUP_SECONDS = 1.5
"""Time that `cleanup` may take in a cancelled rollout. After a second signal the process exits within 2 s."""


class DrawnItem(NamedTuple):
    """An item, its lease if it has one, and the run in which its rollout begins if that is known."""

    item: Item
    lease: LeasedItem | None = None
    run_id: str | None = None


class RolloutRunner:
    """Runner of rollouts: it collects one item per call, and keeps the backlog of items to try next, oldest first."""

    def __init__(self, env: Environment, delivery: Delivery) -> None:
        self.backlog: deque[Item] = deque()
        self._env = env
        self._delivery = delivery
        self._failures_in_a_row = 0
        self.on_stuck: Callable[[Item], None] = lambda _: None
        """Called with an item whose rollout ignores its cancellation."""
        env.delivery = delivery

    async def next_item(self) -> DrawnItem | None:
        """Return the next item: from the backlog first, then one that the broker leases, or the environment's own."""
        if self.backlog:
            return DrawnItem(self.backlog.popleft())
        leases = self._delivery.leases
        if leases is not None:
            leased = await leases.take()
            if leases.supported:
                return None if leased is None else await self._item_of(leased, leases)
        with contained():
            item = await self._env.get_next_item()
        return None if item is None else DrawnItem(item)

    async def _item_of(self, leased: LeasedItem, leases: ItemLeases) -> DrawnItem | None:
        """Return a leased item; None if there is none, or if its data cannot be read.

        If such an item ended the server, it would be leased again first, and end each one that is started after it.
        """
        unread = DrawnItem(f"number {leased.number}", leased)
        for attempt in range(1, self._env.config.rollout_attempts + 1):
            try:
                with contained():
                    item = await self._env.item_at(leased.number)
            except Exception as error:  # an environment's own code may raise anything
                reason = innermost(error)
                if isinstance(reason, ItemDropped):
                    self._count_dropped(unread, NO_GROUP, str(reason))
                    return None
                if isinstance(reason, EnvironmentsError) and reason.ends_server:
                    raise reason from error
                if self._handle_failure(unread, reason, attempt):
                    return None
            else:
                if item is None:
                    leases.drop(leased, NO_ITEM)
                return None if item is None else DrawnItem(item, leased)
        return None

    async def collect(self, drawn: DrawnItem) -> int:
        """Collect and deliver the groups of an item and return their number: 0 if it was dropped, rejected or failed
        too often.

        Only errors that every other item would cause as well are raised.
        """
        begun = self._env.tracing.begin("rollout", environment=self._env.registered_name, step=self._env.curr_step)
        with running(begun) as span:
            sent = await self._collect(drawn, span)
            span.set(groups=sent)
        return sent

    async def _collect(self, drawn: DrawnItem, span: Span) -> int:
        started = time.monotonic()
        for attempt in range(1, self._env.config.rollout_attempts + 1):
            try:
                sent = await self._attempt(drawn)
            except Exception as error:  # an environment's own code may raise anything
                reason = innermost(error)
                if isinstance(reason, ItemDropped):
                    return await self._count_empty(drawn, str(reason), started)
                if isinstance(reason, EnvironmentsError) and reason.ends_server:
                    raise reason from error
                span.note(reason)
                if self._handle_failure(drawn, reason, attempt):
                    span.fail(reason)
                    break
            else:
                self._failures_in_a_row = 0
                self._env.metrics.count_rollout(time.monotonic() - started, succeeded=True)
                return sent if sent is not None else await self._count_empty(drawn, "None was returned", started)
        self._env.metrics.count_rollout(time.monotonic() - started, succeeded=False)
        return 0

    async def _attempt(self, drawn: DrawnItem) -> int | None:
        """Return the number of groups of an item that were sent; None if the environment made none."""
        with buffer_groups(drawn.run_id) as buffer:
            try:
                with record_samples("train"):
                    with self._time_limit(drawn), contained():
                        collected, more = await self._env.collect_trajectories(drawn.item)
                        finished = await self._env.postprocess_histories(collected) if collected else None
                    if finished is not None:
                        with contained():  # no time limit: if a teacher is late, only its logprobs are missing
                            await self._env.handle_send_to_api(finished, drawn.item)
            finally:
                await self._clean_up(drawn)
            waiting = as_items(more)  # raises, before a group is saved, where the environment's own code gave no list
            self._delivery.save(buffer.accepted)  # if this fails, nothing of the item is kept: it can be tried again
            self.backlog.extend(waiting)
            if not finished and not buffer.accepted and not buffer.dropped:  # what was dropped is counted already
                return None
            self._dispatch(drawn, buffer)
        return len(buffer.accepted)

    async def _clean_up(self, drawn: DrawnItem) -> None:
        """Run the environment's `cleanup` to its end, or for `CLEANUP_SECONDS` once the rollout is cancelled."""
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True) as scope:  # else that of a cancelled rollout would end at once
                tasks.start_soon(_limit_once_cancelled, scope)
                with contained():
                    await self._env.cleanup()
            if scope.cancelled_caught:
                logger.warning(
                    "cleanup is cut off %g s after the cancellation of its rollout, of item %.200r",
                    CLEANUP_SECONDS,
                    drawn.item,
                )
            tasks.cancel_scope.cancel()

    @contextmanager
    def _time_limit(self, drawn: DrawnItem) -> Iterator[None]:
        """Cancel the block at the time limit of a rollout; raise `RolloutTimedOut` then."""
        limit = self._env.config.worker_timeout
        with self._noticing_stuck(drawn), anyio.move_on_after(limit if limit > 0 else None) as scope:
            yield
        if scope.cancelled_caught:
            raise RolloutTimedOut(f"it took longer than {limit:g} s (--env.worker_timeout)")

    @contextmanager
    def _noticing_stuck(self, drawn: DrawnItem) -> Iterator[None]:
        """Call `on_stuck` if the block still runs long after the time limit of a rollout has cancelled it."""
        loop, limit = asyncio.get_running_loop(), self._env.config.worker_timeout
        due: list[asyncio.TimerHandle] = []

        def begin() -> None:  # only now, since time in which code blocked the event loop does not count
            due.append(loop.call_later(CANCELLATION_SECONDS, self.on_stuck, drawn.item))

        if limit > 0:
            due.append(loop.call_later(limit, begin))
        try:
            yield
        finally:
            for timer in due:
                timer.cancel()

    def _dispatch(self, drawn: DrawnItem, buffer: Buffer) -> None:
        """Send an item's groups, which are saved, under keys of its own if it is leased."""
        lease = drawn.lease
        keys: Sequence[GroupKey | None] = [None] * len(buffer.accepted)
        if lease is not None and self._delivery.leases is not None:
            if buffer.accepted:
                keys = self._delivery.leases.keys(lease, len(buffer.accepted))
            else:
                self._delivery.leases.drop(lease, buffer.dropped[0] if buffer.dropped else NO_GROUP)
        for group, key in zip(buffer.accepted, keys, strict=True):
            self._delivery.dispatch(group, key, drawn.run_id)

    async def _count_empty(self, drawn: DrawnItem, why: str, started: float) -> int:
        """Count an item without a group, and pause briefly so that a series of such items does not keep a core busy."""
        self._failures_in_a_row = 0
        self._count_dropped(drawn, NO_GROUP, why)
        if time.monotonic() - started < EMPTY_ITEM_PAUSE_SECONDS:
            await anyio.sleep(EMPTY_ITEM_PAUSE_SECONDS)
        return 0

    def _handle_failure(self, drawn: DrawnItem, error: BaseException, attempt: int) -> bool:
        """Log a failed attempt and return True if the item is given up; too many such items in a row end the server.

        One that took too long is not tried again.
        """
        timed_out = isinstance(error, RolloutTimedOut)
        described = describe_error(error)
        if attempt < self._env.config.rollout_attempts and not timed_out:
            self._env.metrics.count_retry()
            logger.info("a rollout failed and is tried again (%s)", described)
            return False
        self._env.metrics.failed += 1
        self._count_dropped(drawn, TIMED_OUT if timed_out else FAILED, f"given up after {described}")
        self._failures_in_a_row += 1
        logger.warning("item %.200r is given up after attempt %d: %s", drawn.item, attempt, described, exc_info=error)
        if self._failures_in_a_row >= self._env.config.max_failures_in_a_row:
            raise RolloutsKeepFailing(f"{self._failures_in_a_row} items failed in a row, the last with {described}")
        return True

    def _count_dropped(self, drawn: DrawnItem, reason: str, why: str) -> None:
        if drawn.lease is not None and self._delivery.leases is not None:
            self._delivery.leases.drop(drawn.lease, reason)
        self._env.dropped_groups.record(Rejection(reason, one_line(why)), lambda: f"last item: {quoted(drawn.item)}")


async def _limit_once_cancelled(scope: anyio.CancelScope) -> None:
    """Wait for the cancellation of the scopes around `scope`, then set its deadline."""
    try:
        await anyio.sleep_forever()
    finally:
        scope.deadline = anyio.current_time() + CLEANUP_SECONDS
