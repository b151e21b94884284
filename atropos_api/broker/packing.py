"""The choice of groups for the next batch: an exact fill for any mix of sizes, the oldest groups first.

Among all subsets that add up to the batch size and meet the environments' minima, the one is chosen whose oldest member
is oldest, then whose second oldest is, and so on. Groups of one environment and one size form a lane. The oldest groups
of a lane are always taken first, so the choice is how many of each lane. It is made greedily in order of arrival: a
group is taken if the groups after it can still fill the rest of the batch. Once that fails for a lane, it fails for the
rest of the lane too (a later group could be exchanged for the earlier one), so each lane is excluded once. The sums
that some groups can reach are a set, stored as the bits of one integer.

A run counts its batch in sequences, which the groups have to add up to exactly, or in whole groups.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from atropos_api.store.base import GroupRow, RunRow

_seq_of = operator.attrgetter("seq")


class Lane(Protocol):
    """The queued groups of one environment and size, oldest first."""

    env_id: int | None
    size: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[GroupRow]: ...


def choose_groups(lanes: Sequence[Lane], target: int, minima: Mapping[int, int]) -> list[GroupRow] | None:
    """Return the groups of the next batch in order of arrival, or None if no subset fills it exactly."""
    sizes = {lane.size for lane in lanes}
    if len(sizes) == 1 and not minima:
        return _choose_oldest(lanes, target, *sizes)
    remainder = _Remainder(lanes, target, minima)
    if not remainder.can_be_made():
        return None
    heads: list[tuple[int, int, GroupRow]] = []
    queues = [iter(lane) for lane in lanes]
    for index, queue in enumerate(queues):
        _push_next(heads, index, queue)
    chosen: list[GroupRow] = []
    while remainder.missing:
        _, index, group = heapq.heappop(heads)
        if remainder.take_one(index):
            chosen.append(group)
            _push_next(heads, index, queues[index])
    return chosen


def most_that_fits(lanes: Sequence[Lane], target: int, minima: Mapping[int, int], owner: int, most: int) -> int:
    """Return the largest minimum of `owner`, up to `most`, that a batch can meet in addition to `minima`."""
    least = 0
    while least < most:
        # If a batch cannot meet a minimum, it cannot meet a larger one: a binary search finds the limit.
        middle = (least + most + 1) // 2
        if _Remainder(lanes, target, {**minima, owner: middle}).can_be_made():
            least = middle
        else:
            most = middle - 1
    return least


def _choose_oldest(lanes: Sequence[Lane], target: int, size: int) -> list[GroupRow] | None:
    """Return the oldest groups, where all groups have the same size."""
    count, rest = divmod(target, size)
    if rest or count > sum(map(len, lanes)):
        return None
    return list(islice(heapq.merge(*lanes, key=_seq_of), count))


def can_fill(sizes: Iterable[int], target: int, *, containing: int, at_most: Mapping[int, int] | None = None) -> bool:
    """Return True if groups of `sizes`, in any number, can add up to `target` with one of `containing` among them.

    `at_most` gives further sizes and how many groups of each exist; without it, `containing` is unlimited.
    """
    missing = target - containing
    if missing < 0:
        return False
    counts = {size: missing // size for size in sizes}
    if at_most is None:
        counts[containing] = missing // containing
    else:
        counts |= {size: min(count, missing // size) for size, count in at_most.items()}
        if containing in at_most:
            counts[containing] = min(at_most[containing] - 1, missing // containing)
    sums = 1
    for size, count in counts.items():
        sums = _add_up_to(sums, size, count, missing)
    return bool(sums >> missing & 1)


def adds_up(counts: Mapping[int, int], target: int) -> bool:
    """Return True if some of these groups, counted by size, add up to `target`."""
    sums = 1
    for size, count in counts.items():
        sums = _add_up_to(sums, size, min(count, target // size), target)
    return bool(sums >> target & 1)


class _Remainder:
    """The amount still missing from a batch, and the groups left to fill it."""

    def __init__(self, lanes: Sequence[Lane], target: int, minima: Mapping[int, int]) -> None:
        self.missing = target
        self._sizes = [lane.size for lane in lanes]
        self._owners = [lane.env_id for lane in lanes]
        self._counts = [len(lane) for lane in lanes]
        self._minima: dict[int | None, int] = {env_id: need for env_id, need in minima.items() if need > 0}

    def take_one(self, index: int) -> bool:
        """Take the next group of a lane if the rest can still be filled; otherwise exclude the lane."""
        size, owner = self._sizes[index], self._owners[index]
        need = self._minima.get(owner, 0)
        self._counts[index] -= 1
        self.missing -= size
        if need:
            self._minima[owner] = need - size
        if self.missing >= 0 and self.can_be_made():
            return True
        self.missing += size
        self._counts[index] = 0
        if need:
            self._minima[owner] = need
        return False

    def can_be_made(self) -> bool:
        free: dict[int, int] = {}
        bound: dict[int | None, list[int]] = {owner: [] for owner, need in self._minima.items() if need > 0}
        for index, count in enumerate(self._counts):
            if count and self._owners[index] in bound:
                bound[self._owners[index]].append(index)
            elif count:
                free[self._sizes[index]] = free.get(self._sizes[index], 0) + count
        if not bound and len(free) <= 1:
            return self._fits_one_size(free)
        return self._fits(free, bound)

    def _fits_one_size(self, free: Mapping[int, int]) -> bool:
        if not self.missing:
            return True
        return any(self.missing % size == 0 and size * count >= self.missing for size, count in free.items())

    def _fits(self, free: Mapping[int, int], bound: Mapping[int | None, Sequence[int]]) -> bool:
        missing = self.missing
        sums = 1
        for size, count in free.items():
            sums = _add_up_to(sums, size, min(count, missing // size), missing)
        for owner, indices in bound.items():
            own = 1
            for index in indices:
                size = self._sizes[index]
                own = _add_up_to(own, size, min(self._counts[index], missing // size), missing)
            own = own >> self._minima[owner] << self._minima[owner]
            sums = _sums_of_both(sums, own, missing)
        return bool(sums >> missing & 1)


def _push_next(heads: list[tuple[int, int, GroupRow]], index: int, queue: Iterator[GroupRow]) -> None:
    group = next(queue, None)
    if group is not None:
        heapq.heappush(heads, (group.seq, index, group))


def _add_up_to(sums: int, size: int, count: int, limit: int) -> int:
    """Return `sums` with up to `count` more groups of `size`; sums above `limit` are left out."""
    mask = (1 << (limit + 1)) - 1
    step = 1
    while count > 0:
        taken = min(step, count)
        sums |= sums << (taken * size) & mask
        count -= taken
        step *= 2
    return sums


def _sums_of_both(first: int, second: int, limit: int) -> int:
    """Return every sum, up to `limit`, of one member of each set."""
    if first.bit_count() > second.bit_count():
        first, second = second, first
    combined = 0
    while first:
        lowest = first & -first
        combined |= second << (lowest.bit_length() - 1)
        first ^= lowest
    return combined & ((1 << (limit + 1)) - 1)


@dataclass(slots=True)
class CountedLane:
    """A lane whose groups count as one each, whatever their size."""

    lane: Lane
    env_id: int | None
    size: int = 1

    def __len__(self) -> int:
        return len(self.lane)

    def __iter__(self) -> Iterator[GroupRow]:
        return iter(self.lane)


def lanes_in_unit(run: RunRow, lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Return the lanes in the run's unit: unchanged for sequences, else wrapped so that a group counts as one."""
    return lanes if run.unit == "sequences" else [CountedLane(lane, lane.env_id) for lane in lanes]


def amount(run: RunRow, groups: Collection[GroupRow]) -> int:
    """Return how much of a batch these groups fill, in the run's unit."""
    return sum(group.size for group in groups) if run.unit == "sequences" else len(groups)


def queued_by_environment(run: RunRow, lanes: Sequence[Lane]) -> dict[int | None, int]:
    """Return how much each environment has queued, in the run's unit."""
    queued: dict[int | None, int] = {}
    for lane in lanes_in_unit(run, lanes):
        queued[lane.env_id] = queued.get(lane.env_id, 0) + lane.size * len(lane)
    return queued


def batch_in_sequences(run: RunRow, group_size: int) -> int:
    """Return the batch size in sequences; if the run counts groups, each is taken to have `group_size` sequences."""
    return run.batch_size if run.unit == "sequences" else run.batch_size * group_size


def part_of_batch(batch_size: int, share: float) -> int:
    """Return this share of a batch, rounded down; 0.29 of 100 is 29, although the product of the floats is below it."""
    return int(batch_size * share + 1e-6)


def in_unit(run: RunRow, groups_by_size: Mapping[int, int]) -> int:
    """Return counts of groups by size as one amount in the run's unit."""
    if run.unit == "groups":
        return sum(groups_by_size.values())
    return sum(size * count for size, count in groups_by_size.items())
