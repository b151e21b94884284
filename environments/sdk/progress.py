"""The progress of the groups that are being collected: members that are done, and the last thing that one did.

It costs a few assignments a request and decides nothing: the broker's page uses it to name a straggler, and to tell a
slow tool from a slow server. An environment may add to it:

    note_event("sandbox: running the tests")

The current group is found through the context, so that tools and rewards need not be handed anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

KEPT_DURATIONS: Final = 1000
FEWEST_DURATIONS: Final = 10
"""Groups that have to be finished before their 95th percentile is reported."""

LONGEST_NAME: Final = 100


@dataclass(slots=True, eq=False)
class MemberProgress:
    """One rollout of a group, and the last thing that it did."""

    index: int
    event: str = ""
    event_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class GroupProgress:
    """One group under collection; times are those of `time.monotonic`."""

    name: str
    wanted: int
    began_at: float
    attempts_done: int = 0
    sequences_done: int = 0
    event: str = ""
    event_at: float = 0.0
    members: dict[int, MemberProgress] = field(default_factory=dict)
    """Members that are not finished, where they are collected one by one."""

    @property
    def done(self) -> int:
        """Members that are finished: counted by attempts or by the sequences of closed sessions, whichever are more."""
        return min(self.wanted, max(self.attempts_done, self.sequences_done))


_current: ContextVar[GroupProgress | None] = ContextVar("group_progress", default=None)
_current_member: ContextVar[MemberProgress | None] = ContextVar("member_progress", default=None)


def note_event(text: str) -> None:
    """Record what the current group does now, in a few words; it is shown if the group takes long."""
    now = time.monotonic()
    for progress in (_current.get(), _current_member.get()):
        if progress is not None:
            progress.event, progress.event_at = encodable(text[:LONGEST_NAME]), now


@contextmanager
def collecting_member(index: int) -> Iterator[None]:
    """Count the block as the collection of one member of the current group."""
    group = _current.get()
    if group is None:
        yield
        return
    member = group.members[index] = MemberProgress(index)
    token = _current_member.set(member)
    try:
        yield
    finally:
        _current_member.reset(token)
        if group.members.get(index) is member:  # the next draw of the same member may have taken its place
            del group.members[index]


def note_attempt_done() -> None:
    """Record that one attempt of the current group is finished."""
    progress = _current.get()
    if progress is not None:
        progress.attempts_done += 1


def note_sequences_done(count: int) -> None:
    """Record that a session of the current group was closed with so many sequences."""
    progress = _current.get()
    if progress is not None:
        progress.sequences_done += count


class OpenGroups:
    """The groups that are being collected, and how long the last ones took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.finished = 0
        self._clock = clock
        self._open: dict[int, GroupProgress] = {}
        self._durations: deque[float] = deque(maxlen=KEPT_DURATIONS)

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def collecting(self, item: Any, wanted: int) -> Iterator[GroupProgress]:
        """Count the block as the collection of one group; what is noted inside it is about that group."""
        progress = GroupProgress(name_of(item), wanted, self._clock())
        self._open[id(progress)] = progress
        token = _current.set(progress)
        try:
            yield progress
            self._durations.append(self._clock() - progress.began_at)
            self.finished += 1
        finally:
            _current.reset(token)
            del self._open[id(progress)]

    def slowest(self, count: int) -> list[GroupProgress]:
        """Return the groups that have been collected for longest, the oldest first."""
        return sorted(self._open.values(), key=lambda one: one.began_at)[:count]

    def usual_seconds(self) -> float | None:
        """Return the 95th percentile of the time that a group took lately; None while too few are finished."""
        if len(self._durations) < FEWEST_DURATIONS:
            return None
        return sorted(self._durations)[int(0.95 * (len(self._durations) - 1))]


def name_of(item: Any) -> str:
    """Return an item in a few words: its question if it has one, else its form in Python, else its type.

    A property of its own may raise, and so does the form of a number of more than 4,300 digits: no reason to end the
    server, which only shows the name.
    """
    try:
        return _name_of(item)
    except Exception:  # noqa: BLE001 - an environment's own items may raise anything
        return _short(type(item).__name__)


def _name_of(item: Any) -> str:
    for name in ("question", "prompt", "problem", "name"):
        found = item.get(name) if isinstance(item, dict) else getattr(item, name, None)
        if isinstance(found, str) and found.strip():
            return _short(found)
    return _short(item if isinstance(item, str) else repr(item))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return encodable(line if len(line) <= LONGEST_NAME else f"{line[: LONGEST_NAME - 1]}…")


def encodable(text: str) -> str:
    """Return text that a report can hold: half a surrogate pair, as data and tools may have, stands as its number."""
    return text.encode("utf-8", "backslashreplace").decode()
