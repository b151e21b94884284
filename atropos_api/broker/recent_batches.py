"""The newest groups handed out to trainers, and the trainers' reports on their tokens: kept in memory, for the page.

The store drops a batch once a checkpoint covers it. People look at rollouts later than that, so the bodies that were
read for a delivery anyway are kept here, up to a number of bytes; the oldest batches are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from atropos_api.store.base import GroupRow

BatchKey = tuple[str, int]
"""A run's id and the number of a batch."""


@dataclass(slots=True)
class RecentGroup:
    """A group that was handed out: its row as it was then, and its body."""

    row: GroupRow
    body: bytes


@dataclass(slots=True)
class RecentBatch:
    """A batch of which groups were handed out, by their index in the whole batch."""

    rows: Sequence[GroupRow]
    """All groups of the batch, in order."""
    groups: dict[int, RecentGroup] = field(default_factory=dict)
    reports: dict[int, bytes] = field(default_factory=dict)
    """The trainer's report on tokens of this batch, as it was sent, by the rank that sent it."""
    size_bytes: int = 0


class RecentBatches:
    """The newest batches handed out, at most `limit_bytes` of bodies and reports together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self.handed_at: float | None = None
        """Time at which a batch was last handed out."""
        self._batches: OrderedDict[BatchKey, RecentBatch] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[BatchKey, RecentBatch]]:
        """Yield the batches, newest first."""
        return iter(list(self._batches.items())[::-1])

    def get(self, run_id: str, number: int) -> RecentBatch | None:
        return self._batches.get((run_id, number))

    def add(
        self, batches: Mapping[int, Sequence[GroupRow]], groups: Sequence[GroupRow], bodies: Sequence[bytes], now: float
    ) -> None:
        """Keep groups that are handed out; `batches` are the formed batches by number, each with all its groups."""
        self.handed_at = now
        bodies_by_seq = {row.seq: body for row, body in zip(groups, bodies, strict=True)}
        for number in {row.batch for row in groups} & batches.keys():
            whole = batches[number]
            batch = self._batch((whole[0].run_id, number), whole)
            for index, row in enumerate(whole):
                body = bodies_by_seq.get(row.seq)
                fits = body is not None and batch.size_bytes + len(body) <= self._limit_bytes
                if body is not None and fits and index not in batch.groups:
                    batch.groups[index] = RecentGroup(row, body)
                    self._count(batch, len(body))
            if not batch.groups:  # none fits; an empty batch has no bytes for which it would be dropped later
                self._drop((whole[0].run_id, number))
        self._shrink()

    def add_report(self, run_id: str, number: int, rank: int, report: bytes) -> bool:
        """Keep a trainer's report on a batch; return False if the batch is not among the newest any more."""
        batch = self._batches.get((run_id, number))
        if batch is None:
            return False
        self._count(batch, len(report) - len(batch.reports.get(rank, b"")))
        batch.reports[rank] = report
        self._shrink()
        return True

    def _batch(self, key: BatchKey, whole: Sequence[GroupRow]) -> RecentBatch:
        batch = self._batches.get(key)
        if batch is None or [row.seq for row in batch.rows] != [row.seq for row in whole]:
            # A resumed run forms a batch of this number again, from other groups.
            self._drop(key)
            batch = self._batches[key] = RecentBatch(list(whole))
        return batch

    def _count(self, batch: RecentBatch, size: int) -> None:
        batch.size_bytes += size
        self._size_bytes += size

    def _shrink(self) -> None:
        while self._size_bytes > self._limit_bytes and self._batches:
            self._drop(next(iter(self._batches)))

    def _drop(self, key: BatchKey) -> None:
        batch = self._batches.pop(key, None)
        if batch is not None:
            self._size_bytes -= batch.size_bytes
