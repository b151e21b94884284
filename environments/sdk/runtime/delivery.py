"""Delivery of the groups of rollouts: they are checked and counted, saved if a file is configured, and sent.

Inside `buffer_groups` the groups that pass are only collected, so that a rollout sends all of them at its end or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from atropos_api.common.tracing import FIELD, Span, current_span
from atropos_api.wire.groups import Group
from environments.sdk.environment import Environment
from environments.sdk.group_files import Chats, GroupFile, RecentGroups
from environments.sdk.groups import GroupRules, Item, as_groups, fill_absent, to_wire
from environments.sdk.reporting import LATE, NO_GROUP, Rejection, last_answer, quoted
from environments.sdk.runtime.items import GroupKey, ItemLeases
from environments.sdk.session.tokens_and_masks import SampleLog, current_sample_log, messages_of

logger = logging.getLogger(__name__)

Send = Callable[[Group, GroupKey | None, str | None], None]
"""Sends a group, under the key of its item if it has one, for the run that its rollout was begun in if that is known.
"""


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
        self.save([accepted])
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

    def save(self, accepted: Sequence[Accepted]) -> None:
        """Write groups to the files that are configured; after an error the file of all groups has none of them."""
        if self.file is not None and accepted:
            self.file.append(*(one.group for one in accepted))
        if self._recent is not None:
            for one in accepted:
                self._recent.offer(one.group, one.chats)


def _note_reason(buffer: Buffer | None, reason: str) -> None:
    if buffer is not None:
        buffer.dropped.append(reason)
