"""The queue of groups that wait for a batch, with counts updated whenever a group is added or removed.

Nothing here walks the queue to count: status, pacing and forming a batch cost the same with one group queued or a
hundred thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from atropos_api.store.base import GroupRow

KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class QueueLane:
    """Groups of one environment and size, oldest first. A group taken from the middle is only marked as removed."""

    env_id: int | None
    size: int
    rows: deque[GroupRow] = field(default_factory=deque)
    removed: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.rows) - len(self.removed)

    def __iter__(self) -> Iterator[GroupRow]:
        if not self.removed:
            return iter(self.rows)
        return (row for row in self.rows if row.seq not in self.removed)

    def remove(self, seq: int) -> None:
        self.removed.add(seq)
        while self.rows and self.rows[0].seq in self.removed:
            self.removed.discard(self.rows.popleft().seq)


class GroupQueue:
    """All queued groups: lanes by (environment, size), and the sums over them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lanes: dict[tuple[int | None, int], QueueLane] = {}
        self._by_version: dict[int | None, dict[int, GroupRow]] = {}
        self.groups = 0
        self.sequences = 0
        self.body_bytes = 0
        self.sequences_by_env: dict[int | None, int] = {}
        self.groups_by_size: dict[int, int] = {}

    def add(self, row: GroupRow) -> None:
        self._lane(row).rows.append(row)
        self._by_version.setdefault(version_of(row), {})[row.seq] = row
        self._count(row, 1)

    def put_back(self, rows: Iterable[GroupRow]) -> None:
        """Return groups of a dissolved batch (or of a reopened run) to their old places."""
        returned = list(rows)
        lanes = {(row.env_id, row.size): self._lane(row) for row in returned}
        for lane in lanes.values():
            # A group removed earlier is still marked as removed, and would stay hidden when it is added again.
            lane.rows = deque(lane)
            lane.removed.clear()
        for row in returned:
            self.add(row)
        for lane in lanes.values():
            lane.rows = deque(sorted(lane.rows, key=lambda row: row.seq))

    def remove(self, row: GroupRow) -> None:
        lane = self._lanes[row.env_id, row.size]
        lane.remove(row.seq)
        if not lane:
            del self._lanes[row.env_id, row.size]
        version = version_of(row)
        peers = self._by_version[version]
        del peers[row.seq]
        if not peers:
            del self._by_version[version]
        self._count(row, -1)

    def clear(self) -> list[GroupRow]:
        """Empty the queue and return its groups, oldest first."""
        rows = sorted((row for lane in self._lanes.values() for row in lane), key=lambda row: row.seq)
        self._reset()
        return rows

    @property
    def lanes(self) -> list[QueueLane]:
        return list(self._lanes.values())

    def lanes_of(self, env_id: int | None) -> list[QueueLane]:
        return [lane for (owner, _), lane in self._lanes.items() if owner == env_id]

    def lanes_of_size(self, size: int) -> list[QueueLane]:
        return [lane for (_, lane_size), lane in self._lanes.items() if lane_size == size]

    def largest_size_of(self, env_id: int | None) -> int:
        return max((size for owner, size in self._lanes if owner == env_id), default=0)

    @property
    def sizes(self) -> set[int]:
        return set(self.groups_by_size)

    def versions(self) -> list[int | None]:
        """Return the policy versions that queued groups were sampled under (or received under, if they name none)."""
        return list(self._by_version)

    def of_version(self, version: int | None) -> list[GroupRow]:
        return list(self._by_version.get(version, {}).values())

    def oldest(self) -> GroupRow | None:
        heads = [next(iter(lane)) for lane in self._lanes.values()]
        return min(heads, key=lambda row: row.seq, default=None)

    def _lane(self, row: GroupRow) -> QueueLane:
        lane = self._lanes.get((row.env_id, row.size))
        if lane is None:
            lane = self._lanes[row.env_id, row.size] = QueueLane(row.env_id, row.size)
        return lane

    def _count(self, row: GroupRow, sign: int) -> None:
        self.groups += sign
        self.sequences += sign * row.size
        self.body_bytes += sign * row.body.length
        _shift(self.sequences_by_env, row.env_id, sign * row.size)
        _shift(self.groups_by_size, row.size, sign)


def version_of(row: GroupRow) -> int | None:
    """Return the version that decides a group's age: its oldest token's, else the newest one at its arrival."""
    return row.oldest_version if row.oldest_version is not None else row.received_version


def _shift(counts: dict[KeyT, int], key: KeyT, by: int) -> None:
    value = counts.get(key, 0) + by
    if value:
        counts[key] = value
    else:
        counts.pop(key, None)
