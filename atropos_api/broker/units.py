"""What a batch is counted in: sequences, which the groups have to add up to exactly, or whole groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from atropos_api.broker.packing import Lane
from atropos_api.store.base import GroupRow, RunRow


@dataclass(slots=True)
class CountedLane:
    """A lane whose groups count one each, whatever they hold."""

    lane: Lane
    env_id: int | None
    size: int = 1

    def __len__(self) -> int:
        return len(self.lane)

    def __iter__(self) -> Iterator[GroupRow]:
        return iter(self.lane)


def lanes_in_unit(run: RunRow, lanes: Sequence[Lane]) -> Sequence[Lane]:
    """The lanes as the choice of a batch of `run` should count them."""
    return lanes if run.unit == "sequences" else [CountedLane(lane, lane.env_id) for lane in lanes]


def amount(run: RunRow, groups: Collection[GroupRow]) -> int:
    """How much of a batch these groups fill."""
    return sum(group.size for group in groups) if run.unit == "sequences" else len(groups)


def queued_by_environment(run: RunRow, lanes: Sequence[Lane]) -> dict[int | None, int]:
    """What each environment has queued, in the run's unit."""
    queued: dict[int | None, int] = {}
    for lane in lanes_in_unit(run, lanes):
        queued[lane.env_id] = queued.get(lane.env_id, 0) + lane.size * len(lane)
    return queued


def batch_in_sequences(run: RunRow, group_size: int) -> int:
    """Sequences in a batch; where groups are counted, in one made of groups of `group_size`."""
    return run.batch_size if run.unit == "sequences" else run.batch_size * group_size


def in_unit(run: RunRow, groups_by_size: Mapping[int, int]) -> int:
    """Counts of groups by size as one amount in the run's unit."""
    if run.unit == "groups":
        return sum(groups_by_size.values())
    return sum(size * count for size, count in groups_by_size.items())
