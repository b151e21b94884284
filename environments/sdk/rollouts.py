"""One item's way through the environment: collected, postprocessed, delivered, or given up with a report."""

from __future__ import annotations

import logging
import time
from collections import deque

import anyio

from environments.sdk.delivery import Delivery, hold_groups
from environments.sdk.drops import FAILED, NO_GROUP, TIMED_OUT, Rejection, one_line, quoted
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError, ItemDropped, RolloutsKeepFailing, innermost
from environments.sdk.session.journal import keep_journal
from environments.sdk.types import Item

logger = logging.getLogger(__name__)

NOTHING_PAUSE_SECONDS = 0.01


class Collector:
    """Collects one item at a time for any caller; keeps the backlog of items to try next, the oldest first."""

    def __init__(self, env: BaseEnv, delivery: Delivery) -> None:
        self.backlog: deque[Item] = deque()
        self._env = env
        self._delivery = delivery
        self._failures_in_a_row = 0
        env.delivery = delivery

    async def next_item(self) -> Item:
        """From the backlog first, then from the environment."""
        return self.backlog.popleft() if self.backlog else await self._env.get_next_item()

    async def collect(self, item: Item) -> int:
        """Collect and deliver the groups of `item`; how many, none if it was dropped, rejected or failed too often.

        Raises only what would fail for every other item as well.
        """
        started = time.monotonic()
        for attempt in range(1, self._env.config.rollout_attempts + 1):
            try:
                sent = await self._attempt(item)
            except Exception as error:  # an environment's own code may raise anything
                reason = innermost(error)
                if isinstance(reason, ItemDropped):
                    return await self._came_to_nothing(item, str(reason), started)
                if isinstance(reason, EnvironmentsError) and reason.ends_server:
                    raise reason from error
                if self._gave_up(item, reason, attempt):
                    break
            else:
                self._failures_in_a_row = 0
                self._env.metrics.seconds_succeeded.append(time.monotonic() - started)
                return sent if sent is not None else await self._came_to_nothing(item, "None was returned", started)
        self._env.metrics.seconds_failed.append(time.monotonic() - started)
        return 0

    async def _attempt(self, item: Item) -> int | None:
        """How many groups of `item` were sent; None where the environment made no group of it."""
        limit = self._env.config.worker_timeout
        try:
            with keep_journal("train"), hold_groups() as accepted:
                with anyio.fail_after(limit if limit > 0 else None):
                    collected, more = await self._env.collect_trajectories(item)
                finished = await self._env.postprocess_histories(collected) if collected else None
                if finished is not None:
                    await self._env.handle_send_to_api(finished, item)
        finally:
            await self._env.cleanup()
        self.backlog.extend(more)
        for group in accepted:
            self._delivery.dispatch(group)
        return len(accepted) if finished else None

    async def _came_to_nothing(self, item: Item, why: str, started: float) -> int:
        """Count an item that the environment makes no group of, and keep such items from keeping a core busy."""
        self._failures_in_a_row = 0
        self._drop(item, NO_GROUP, why)
        if time.monotonic() - started < NOTHING_PAUSE_SECONDS:
            await anyio.sleep(NOTHING_PAUSE_SECONDS)
        return 0

    def _gave_up(self, item: Item, error: BaseException, attempt: int) -> bool:
        """Log a failed attempt. A timeout is not tried again; too many items given up in a row end the server."""
        described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if attempt < self._env.config.rollout_attempts and not isinstance(error, TimeoutError):
            self._env.metrics.retried += 1
            logger.info("a rollout failed and is tried again (%s)", described)
            return False
        self._env.metrics.failed += 1
        self._drop(item, TIMED_OUT if isinstance(error, TimeoutError) else FAILED, f"given up after {described}")
        self._failures_in_a_row += 1
        logger.warning("item %.200r is given up after attempt %d: %s", item, attempt, described, exc_info=error)
        if self._failures_in_a_row >= self._env.config.max_failures_in_a_row:
            raise RolloutsKeepFailing(f"{self._failures_in_a_row} items failed in a row, the last with {described}")
        return True

    def _drop(self, item: Item, reason: str, why: str) -> None:
        self._env.dropped_groups.note(Rejection(reason, one_line(why)), lambda: f"last item: {quoted(item)}")
