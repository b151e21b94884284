"""One item's way from the environment to a group: collected, postprocessed, checked, or given up with a report."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import anyio

from atropos_api.wire.groups import Group
from environments.sdk.env import BaseEnv
from environments.sdk.errors import EnvironmentsError, RolloutsKeepFailing
from environments.sdk.groups import GroupRules, to_wire
from environments.sdk.session.journal import keep_journal
from environments.sdk.types import Item

logger = logging.getLogger(__name__)


class Collector:
    """Collects the groups of one item at a time for any caller; keeps the backlog of items to try next."""

    def __init__(self, env: BaseEnv) -> None:
        self.backlog: deque[Item] = deque()
        self._env = env
        self._failures_in_a_row = 0

    async def next_item(self) -> Item:
        """From the backlog first, then from the environment."""
        return self.backlog.popleft() if self.backlog else await self._env.get_next_item()

    async def collect(self, item: Item, rules: GroupRules) -> list[Group]:
        """The groups of `item` that may be sent; none if it was dropped, rejected or failed too often.

        Raises only what would fail for every other item as well.
        """
        started = time.monotonic()
        for attempt in range(1, self._env.config.rollout_attempts + 1):
            try:
                groups = await self._attempt(item, rules)
            except Exception as error:  # an environment's own code may raise anything
                reason = _innermost(error)
                if isinstance(reason, EnvironmentsError) and reason.ends_server:
                    raise reason from error
                if self._gave_up(item, reason, attempt):
                    break
            else:
                self._failures_in_a_row = 0
                self._env.metrics.seconds_succeeded.append(time.monotonic() - started)
                return groups
        self._env.metrics.seconds_failed.append(time.monotonic() - started)
        return []

    async def _attempt(self, item: Item, rules: GroupRules) -> list[Group]:
        limit = self._env.config.worker_timeout
        with keep_journal("train") as journal:
            with anyio.fail_after(limit if limit > 0 else None):
                collected, more = await self._env.collect_trajectories(item)
            finished = await self._env.postprocess_histories(collected) if collected else None
            groups = [to_wire(raw, journal) for raw in _as_groups(finished)]
        self.backlog.extend(more)
        await self._env.cleanup()
        return [group for group in groups if self._accept(group, rules)]

    def _accept(self, group: Group, rules: GroupRules) -> bool:
        rejected = rules.why_rejected(group)
        if rejected is not None:
            self._env.metrics.rejected += 1
            logger.debug("a group is not sent: %s", rejected)
            return False
        self._add_messages(group)
        return True

    def _add_messages(self, group: Group) -> None:
        if self._env.config.include_messages and group.messages is None:
            texts = self._env.tokenizer.batch_decode(group.tokens)
            group.messages = [[{"role": "user", "content": text}] for text in texts]

    def _gave_up(self, item: Item, error: BaseException, attempt: int) -> bool:
        """Log a failed attempt. A timeout is not tried again; too many items given up in a row end the server."""
        described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if attempt < self._env.config.rollout_attempts and not isinstance(error, TimeoutError):
            self._env.metrics.retried += 1
            logger.info("a rollout failed and is tried again (%s)", described)
            return False
        self._env.metrics.failed += 1
        self._failures_in_a_row += 1
        logger.warning("item %.200r is given up after attempt %d: %s", item, attempt, described, exc_info=error)
        if self._failures_in_a_row >= self._env.config.max_failures_in_a_row:
            raise RolloutsKeepFailing(f"{self._failures_in_a_row} items failed in a row, the last with {described}")
        return True


def _as_groups(finished: Any) -> list[Mapping[str, Any]]:
    if finished is None:
        return []
    return [finished] if isinstance(finished, Mapping) else [group for group in finished if group is not None]


def _innermost(error: BaseException) -> BaseException:
    """The first real error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
