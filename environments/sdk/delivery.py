"""From what an environment collected to groups on their way: judged, noted for the metrics, saved, and sent.

A rollout sends all its groups at its end or none of them, so that one tried again after an error sends nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from atropos_api.common.whole_files import free_path
from atropos_api.wire.groups import Group
from environments.sdk.drops import NO_GROUP, Rejection, last_answer, quoted
from environments.sdk.groups import GroupRules, to_wire
from environments.sdk.recent_groups import Chats, RecentGroups
from environments.sdk.session.journal import Journal, current_journal
from environments.sdk.transcripts import messages_of
from environments.sdk.types import Item

if TYPE_CHECKING:
    from environments.sdk.env import BaseEnv

logger = logging.getLogger(__name__)

Send = Callable[[Group], None]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group to be sent; its rollouts as chats are made when somebody is to read them."""

    group: Group
    chats: Callable[[], Chats]


_held: ContextVar[list[Accepted] | None] = ContextVar("held", default=None)


@contextmanager
def hold_groups() -> Iterator[list[Accepted]]:
    """Collect what is delivered inside, in this task and those it starts, instead of sending it."""
    held: list[Accepted] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


class Delivery:
    """Where an environment's groups go: by way of the file of groups, if there is one, to `send`."""

    def __init__(self, env: BaseEnv, rules: Callable[[], GroupRules], send: Send) -> None:
        self._env = env
        self._rules = rules
        self._send = send
        path, keep = env.config.data_path_to_save_groups, env.config.groups_to_keep
        self.file = GroupFile(Path(path)) if path is not None and not keep else None
        self._recent = RecentGroups(Path(path), keep) if path is not None and keep else None

    async def deliver(self, scored_data: Any, item: Item, *, send: bool, check_length: bool) -> None:
        """Send the groups that the rules allow; inside of `hold_groups` they wait for its end."""
        rules = self._rules() if check_length else replace(self._rules(), max_token_length=-1)
        dropped = self._env.dropped_groups
        for raw in as_groups(scored_data):
            if raw is None:
                dropped.note(Rejection(NO_GROUP, "the environment returned None"), lambda: f"last item: {quoted(item)}")
                continue
            journal = current_journal() or Journal("train")
            group = to_wire(raw, journal)
            if not self._accept(group, rules, journal):
                continue
            await self._env.add_rollouts_for_wandb(raw, item)
            held, accepted = _held.get(), Accepted(group, partial(self._chats, group, journal))
            if not send:
                self._save(accepted)
            elif held is not None:
                held.append(accepted)
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

    def _accept(self, group: Group, rules: GroupRules, journal: Journal) -> bool:
        rejected = rules.why_rejected(group)
        if rejected is not None:
            self._env.metrics.rejected += 1
            logger.debug("a group is not sent: %s", rejected.why)
            self._env.dropped_groups.note(rejected, last_answer(group, self._decode))
            return False
        if self._env.config.include_messages and group.messages is None:
            group.messages = self._chats(group, journal)
        return True

    def _chats(self, group: Group, journal: Journal) -> Chats:
        rollouts = zip(group.tokens, group.masks, strict=True)
        return [messages_of(journal.find(tokens), tokens, mask, self._read) for tokens, mask in rollouts]

    def _read(self, tokens: list[int]) -> str:
        return str(self._env.tokenizer.decode(tokens, skip_special_tokens=True))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._env.tokenizer.decode(tokens))

    def _save(self, accepted: Accepted) -> None:
        if self.file is not None:
            self.file.append(accepted.group)
        if self._recent is not None:
            self._recent.offer(accepted.group, accepted.chats)


class GroupFile:
    """Groups as JSON lines in a file of their own, made with the first one: nothing is ever overwritten."""

    def __init__(self, wanted: Path) -> None:
        self.path = wanted
        self.count = 0
        self._file: BinaryIO | None = None

    def append(self, group: Group) -> None:
        """Add a line that is on its way to the disk when this returns."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path = free_path(self.path)
            self._file = self.path.open("xb")
        self._file.write(msgspec.json.encode(group) + b"\n")
        self._file.flush()
        self.count += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def as_groups(scored_data: Any) -> list[Mapping[str, Any] | None]:
    """One group or several as a list; None stands for one that the environment dropped."""
    return [scored_data] if scored_data is None or isinstance(scored_data, Mapping) else list(scored_data)
