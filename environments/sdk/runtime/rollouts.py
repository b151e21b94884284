"""One item's rollout, from collection to delivery: collected, postprocessed and delivered, or given up with a report.

`RolloutRunner` collects items and tries failed ones again. `Delivery` checks the collected groups, counts them, saves
them and sends them. A rollout sends all its groups at its end or none of them, so that one that is tried again after an
error sends nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio

from atropos_api.common.tracing import FIELD, Span, current_span, running
from atropos_api.wire.groups import Group
from environments.sdk.environment import Environment
from environments.sdk.errors import (
    EnvironmentsError,
    ItemDropped,
    RolloutsKeepFailing,
    RolloutTimedOut,
    contained,
    innermost,
)
from environments.sdk.group_files import Chats, GroupFile, RecentGroups
from environments.sdk.groups import GroupRules, Item, as_groups, fill_absent, to_wire
from environments.sdk.reporting import FAILED, LATE, NO_GROUP, TIMED_OUT, Rejection, last_answer, one_line, quoted
from environments.sdk.runtime.items import GroupKey, ItemLeases, LeasedItem
from environments.sdk.session.tokens_and_masks import SampleLog, current_sample_log, messages_of, record_samples

if TYPE_CHECKING:
    from environments.sdk.environment import Environment

logger = logging.getLogger(__name__)

Send = Callable[[Group, GroupKey | None, str | None], None]
"""Sends a group, under the key of its item if it has one, for the run that its rollout was begun in if that is known.
"""


class DrawnItem(NamedTuple):
    """An item, its lease if it has one, and the run in which its rollout begins if that is known."""

    item: Item
    lease: LeasedItem | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that passed the rules: its chats are built only when they are saved for people to read."""

    group: Group
    chats: Callable[[], Chats]


@dataclass(slots=True)
class Buffer:
    """The groups of one rollout, the reasons for which others of it were dropped, and what happened to the rollout."""

    run_id: str | None = None
    """The run in which the rollout began, if that is known."""
    accepted: list[Accepted] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    outcome: Literal["open", "sent", "failed"] = "open"


_buffer: ContextVar[Buffer | None] = ContextVar("buffer", default=None)


@contextmanager
def buffer_groups(run_id: str | None = None) -> Iterator[Buffer]:
    """Collect the groups delivered inside the block, in this task and those it starts, instead of sending them.

    A task that outlives the block delivers late: its groups are sent at once, or dropped if the block failed.
    """
    buffer = Buffer(run_id)
    token = _buffer.set(buffer)
    try:
        yield buffer
        buffer.outcome = "sent"
    finally:
        if buffer.outcome == "open":
            buffer.outcome = "failed"
        _buffer.reset(token)


class GroupSpans:
    """The spans of groups of traced rollouts, each from its end until the broker has acknowledged or refused it."""

    def __init__(self) -> None:
        self._open: dict[int, Span] = {}

    def begin(self, group: Group) -> None:
        """Begin the span of a group that is about to be sent, and hand it on with the group."""
        rollout = current_span()
        if rollout.traceparent is None:
            return
        span = rollout.begin("group", rollouts=len(group.scores), mean_score=sum(group.scores) / len(group.scores))
        assert span.traceparent is not None
        group.generation_params = {**(group.generation_params or {}), FIELD: span.traceparent}
        self._open[id(group)] = span

    def end(self, group: Group, error: Exception | None = None) -> None:
        """End the span of a group that the broker has acknowledged, or refused with `error`."""
        span = self._open.pop(id(group), None)
        if span is not None:
            if error is not None:
                span.fail(error)
            span.end()


class Delivery:
    """Delivery of an environment's groups: it checks and counts them, saves them if a file is configured, and sends
    them.
    """

    def __init__(
        self, env: Environment, rules: Callable[[], GroupRules], send: Send, leases: ItemLeases | None = None
    ) -> None:
        self.leases = leases
        """Leases of the items' numbers; None if the environment draws its own items."""
        self.spans = GroupSpans()
        self._env = env
        self._rules = rules
        self._send = send
        path, keep = env.config.data_path_to_save_groups, env.config.groups_to_keep
        self.file = GroupFile(Path(path)) if path is not None and not keep else None
        self._recent = RecentGroups(Path(path), keep) if path is not None and keep else None
        self._closed = False

    async def deliver(self, scored_data: Any, item: Item, *, send: bool, check_length: bool) -> None:
        """Send the groups that the rules allow; inside `buffer_groups` they are only collected until it ends."""
        rules = self._rules() if check_length else replace(self._rules(), max_token_length=-1)
        dropped = self._env.dropped_groups
        buffer = _buffer.get()
        for raw in as_groups(scored_data):
            if raw is None:
                _note_reason(buffer, NO_GROUP)
                dropped.record(
                    Rejection(NO_GROUP, "the environment returned None"), lambda: f"last item: {quoted(item)}"
                )
                continue
            sample_log = current_sample_log() or SampleLog("train")
            group = to_wire(raw, sample_log)
            if (registered := self._env.server.registered) is not None:
                group.policy = group.policy or registered.policy
            if self.leases is not None:
                self.leases.count_sampled(group)
            if not self._accept(group, rules, sample_log):
                continue
            self._env.metrics.count_absent(fill_absent(group, rules.full_size(group) or 0))
            await self._env.add_rollouts_for_wandb(raw, item)
            accepted = Accepted(group, partial(self._chats, group, sample_log))
            if send and buffer is not None and buffer.outcome == "open":
                buffer.accepted.append(accepted)
            else:
                self._deliver_now(accepted, buffer, item, send=send)

    def _deliver_now(self, accepted: Accepted, buffer: Buffer | None, item: Item, *, send: bool) -> None:
        """Save and send a group outside a rollout, or after it: such a group belongs to the run of its rollout."""
        if self._closed:
            logger.warning("a group of item %.200r came after the environment had stopped, and is dropped", item)
            return
        if send and buffer is not None and buffer.outcome == "failed":
            why = "handle_send_to_api was called by a rollout that had failed before"
            self._env.dropped_groups.record(Rejection(LATE, why), lambda: f"last item: {quoted(item)}")
            return
        self.save(accepted)
        if send:
            self.dispatch(accepted, run_id=None if buffer is None else buffer.run_id)

    def dispatch(self, accepted: Accepted, key: GroupKey | None = None, run_id: str | None = None) -> None:
        """Send a group that was saved."""
        self._env.note_sent(accepted.group)
        self.spans.begin(accepted.group)
        self._send(accepted.group, key, run_id)

    def close(self) -> None:
        self._closed = True
        for file in (self.file, self._recent):
            if file is not None:
                file.close()

    def _accept(self, group: Group, rules: GroupRules, sample_log: SampleLog) -> bool:
        rejected = rules.rejection(group)
        if rejected is not None:
            self._env.metrics.rejected += 1
            _note_reason(_buffer.get(), rejected.reason)
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

    def save(self, accepted: Accepted) -> None:
        """Write a group to the files that are configured."""
        if self.file is not None:
            self.file.append(accepted.group)
        if self._recent is not None:
            self._recent.offer(accepted.group, accepted.chats)


def _note_reason(buffer: Buffer | None, reason: str) -> None:
    if buffer is not None:
        buffer.dropped.append(reason)


NO_ITEM = "no-item"
"""Reason of a number for which the environment has no item."""
EMPTY_ITEM_PAUSE_SECONDS = 0.01
CANCELLATION_SECONDS = 60.0
"""Time that a cancelled rollout may take to end: code of an environment may clean up, or ignore the cancellation."""

CLEANUP_SECONDS = 1.5
"""Time that `cleanup` may take in a cancelled rollout. After a second signal the process exits within 2 s."""


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
        with contained():
            item = await self._env.item_at(leased.number)
        if item is None:
            leases.drop(leased, NO_ITEM)
            return None
        return DrawnItem(item, leased)

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
                        with contained():  # no time limit: a late teacher costs its logprobs, not the group
                            await self._env.handle_send_to_api(finished, drawn.item)
            finally:
                await self._clean_up(drawn)
            self.backlog.extend(more)
            if not finished and not buffer.accepted:
                return None
            self._dispatch(drawn, buffer)
        return len(buffer.accepted)

    async def _clean_up(self, drawn: DrawnItem) -> None:
        """Run the environment's `cleanup` to its end, or for `CLEANUP_SECONDS` once the rollout is cancelled."""
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True) as scope:  # else a cancelled rollout's would end at its first wait
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
        """Send an item's groups, under keys of its own if it is leased."""
        lease = drawn.lease
        for group in buffer.accepted:
            self._delivery.save(group)  # if this fails, no group of the item is sent, so that it can be tried again
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
        described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
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
