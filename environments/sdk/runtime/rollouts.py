"""One item's rollout, from collection to delivery: collected, postprocessed and delivered, or given up with a report.

`RolloutRunner` collects items and tries failed ones again. `Delivery` checks the collected groups, counts them, saves
them and sends them. A rollout sends all its groups at its end or none of them, so that one that is tried again after an
error sends nothing twice.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from atropos_api.wire.groups import Group
from environments.sdk.environment import Environment
from environments.sdk.errors import EnvironmentsError, ItemDropped, RolloutsKeepFailing, innermost
from environments.sdk.group_files import Chats, GroupFile, RecentGroups
from environments.sdk.groups import GroupRules, Item, as_groups, to_wire
from environments.sdk.reporting import FAILED, NO_GROUP, TIMED_OUT, Rejection, last_answer, one_line, quoted
from environments.sdk.session.tokens_and_masks import SampleLog, current_sample_log, messages_of, record_samples

if TYPE_CHECKING:
    from environments.sdk.environment import Environment

logger = logging.getLogger(__name__)

Send = Callable[[Group], None]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that passed the rules: its chats are built only when they are saved for people to read."""

    group: Group
    chats: Callable[[], Chats]


_buffer: ContextVar[list[Accepted] | None] = ContextVar("buffer", default=None)


@contextmanager
def buffer_groups() -> Iterator[list[Accepted]]:
    """Collect the groups delivered inside the block, in this task and those it starts, instead of sending them."""
    buffer: list[Accepted] = []
    token = _buffer.set(buffer)
    try:
        yield buffer
    finally:
        _buffer.reset(token)


class Delivery:
    """Delivery of an environment's groups: it checks and counts them, saves them if a file is configured, and sends
    them.
    """

    def __init__(self, env: Environment, rules: Callable[[], GroupRules], send: Send) -> None:
        self._env = env
        self._rules = rules
        self._send = send
        path, keep = env.config.data_path_to_save_groups, env.config.groups_to_keep
        self.file = GroupFile(Path(path)) if path is not None and not keep else None
        self._recent = RecentGroups(Path(path), keep) if path is not None and keep else None

    async def deliver(self, scored_data: Any, item: Item, *, send: bool, check_length: bool) -> None:
        """Send the groups that the rules allow; inside `buffer_groups` they are only collected."""
        rules = self._rules() if check_length else replace(self._rules(), max_token_length=-1)
        dropped = self._env.dropped_groups
        for raw in as_groups(scored_data):
            if raw is None:
                dropped.record(
                    Rejection(NO_GROUP, "the environment returned None"), lambda: f"last item: {quoted(item)}"
                )
                continue
            sample_log = current_sample_log() or SampleLog("train")
            group = to_wire(raw, sample_log)
            if not self._accept(group, rules, sample_log):
                continue
            await self._env.add_rollouts_for_wandb(raw, item)
            buffer, accepted = _buffer.get(), Accepted(group, partial(self._chats, group, sample_log))
            if not send:
                self._save(accepted)
            elif buffer is not None:
                buffer.append(accepted)
            else:
                self.dispatch(accepted)

    def dispatch(self, accepted: Accepted) -> None:
        self._save(accepted)
        self._env.note_sent(accepted.group)
        self._send(accepted.group)

    def close(self) -> None:
        for file in (self.file, self._recent):
            if file is not None:
                file.close()

    def _accept(self, group: Group, rules: GroupRules, sample_log: SampleLog) -> bool:
        rejected = rules.rejection(group)
        if rejected is not None:
            self._env.metrics.rejected += 1
            logger.debug("a group is not sent: %s", rejected.why)
            self._env.dropped_groups.record(rejected, last_answer(group, self._decode))
            return False
        if self._env.config.include_messages and group.messages is None:
            group.messages = self._chats(group, sample_log)
        return True

    def _chats(self, group: Group, sample_log: SampleLog) -> Chats:
        rollouts = zip(group.tokens, group.masks, strict=True)
        return [messages_of(sample_log.find(tokens), tokens, mask, self._read) for tokens, mask in rollouts]

    def _read(self, tokens: list[int]) -> str:
        return str(self._env.tokenizer.decode(tokens, skip_special_tokens=True))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._env.tokenizer.decode(tokens))

    def _save(self, accepted: Accepted) -> None:
        if self.file is not None:
            self.file.append(accepted.group)
        if self._recent is not None:
            self._recent.offer(accepted.group, accepted.chats)


EMPTY_ITEM_PAUSE_SECONDS = 0.01


class RolloutRunner:
    """Runner of rollouts: it collects one item per call, and keeps the backlog of items to try next, oldest first."""

    def __init__(self, env: Environment, delivery: Delivery) -> None:
        self.backlog: deque[Item] = deque()
        self._env = env
        self._delivery = delivery
        self._failures_in_a_row = 0
        env.delivery = delivery

    async def next_item(self) -> Item:
        """Return the next item, from the backlog first, then from the environment."""
        return self.backlog.popleft() if self.backlog else await self._env.get_next_item()

    async def collect(self, item: Item) -> int:
        """Collect and deliver the groups of `item` and return their number: 0 if it was dropped, rejected or failed too
        often.

        Only errors that every other item would cause as well are raised.
        """
        started = time.monotonic()
        for attempt in range(1, self._env.config.rollout_attempts + 1):
            try:
                sent = await self._attempt(item)
            except Exception as error:  # an environment's own code may raise anything
                reason = innermost(error)
                if isinstance(reason, ItemDropped):
                    return await self._count_empty(item, str(reason), started)
                if isinstance(reason, EnvironmentsError) and reason.ends_server:
                    raise reason from error
                if self._handle_failure(item, reason, attempt):
                    break
            else:
                self._failures_in_a_row = 0
                self._env.metrics.seconds_succeeded.append(time.monotonic() - started)
                return sent if sent is not None else await self._count_empty(item, "None was returned", started)
        self._env.metrics.seconds_failed.append(time.monotonic() - started)
        return 0

    async def _attempt(self, item: Item) -> int | None:
        """Return the number of groups of `item` that were sent; None if the environment made none."""
        limit = self._env.config.worker_timeout
        try:
            with record_samples("train"), buffer_groups() as accepted:
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

    async def _count_empty(self, item: Item, why: str, started: float) -> int:
        """Count an item without a group, and pause briefly so that a series of such items does not keep a core busy."""
        self._failures_in_a_row = 0
        self._count_dropped(item, NO_GROUP, why)
        if time.monotonic() - started < EMPTY_ITEM_PAUSE_SECONDS:
            await anyio.sleep(EMPTY_ITEM_PAUSE_SECONDS)
        return 0

    def _handle_failure(self, item: Item, error: BaseException, attempt: int) -> bool:
        """Log a failed attempt and return True if the item is given up; too many such items in a row end the server.

        A timeout is not tried again.
        """
        described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if attempt < self._env.config.rollout_attempts and not isinstance(error, TimeoutError):
            self._env.metrics.retried += 1
            logger.info("a rollout failed and is tried again (%s)", described)
            return False
        self._env.metrics.failed += 1
        self._count_dropped(
            item, TIMED_OUT if isinstance(error, TimeoutError) else FAILED, f"given up after {described}"
        )
        self._failures_in_a_row += 1
        logger.warning("item %.200r is given up after attempt %d: %s", item, attempt, described, exc_info=error)
        if self._failures_in_a_row >= self._env.config.max_failures_in_a_row:
            raise RolloutsKeepFailing(f"{self._failures_in_a_row} items failed in a row, the last with {described}")
        return True

    def _count_dropped(self, item: Item, reason: str, why: str) -> None:
        self._env.dropped_groups.record(Rejection(reason, one_line(why)), lambda: f"last item: {quoted(item)}")
