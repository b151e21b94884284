"""The rollouts that can be shown: of the newest batches handed out, of formed batches, and of the queue.

The newest are in memory (`recent_batches`); the others are read from the store. How much one call reads is limited,
because it holds up other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import msgspec

from atropos_api.broker.batches import slice_for_rank
from atropos_api.broker.recent_batches import RecentBatch, RecentBatches
from atropos_api.broker.state import State
from atropos_api.errors import StoreDamaged, UnknownRollout
from atropos_api.page.documents import GroupList, GroupSummary
from atropos_api.page.rollouts import Only, Order, fits, in_order, read_line, remarks_of
from atropos_api.store.base import LOST, GroupRow
from atropos_api.wire.reports import GroupValues, TokenReport

MOST_GROUPS: Final = 2000
MOST_QUEUED: Final = 50
MOST_BYTES_READ: Final = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Rollout:
    """A group that can be shown, with its body; `batch` is 0 while it is queued."""

    batch: int
    group: int
    row: GroupRow
    body: bytes
    environment: str
    reports: tuple[bytes, ...] = ()
    """The trainer's reports on its batch."""
    rows: tuple[GroupRow, ...] = ()
    """All groups of its batch."""


class Rollouts:
    """The groups of this broker that can be shown."""

    def __init__(self, state: State, recent: RecentBatches) -> None:
        self._state = state
        self._recent = recent

    def newest(self, run_id: str, *, batch: int | None = None, environment_id: int | None = None) -> list[Rollout]:
        """Return the newest groups of a run, or of one batch or environment in it: as many as may be read at once."""
        found: list[Rollout] = []
        read_bytes = 0
        for rollout in self._all(run_id):
            if batch not in {None, rollout.batch} or environment_id not in {None, rollout.row.env_id}:
                continue
            if not rollout.body:
                read_bytes += rollout.row.body.length
                if read_bytes > MOST_BYTES_READ:
                    break
            found.append(rollout)
            if len(found) == MOST_GROUPS:
                break
        return [read for one in found if (read := self._with_body(one)) is not None]

    def find(self, run_id: str, batch: int, group: int) -> Rollout:
        """Return one group, by the number of its batch and its index there; a queued one by its place."""
        for rollout in self._all(run_id):
            if (rollout.batch, rollout.group) == (batch, group):
                read = self._with_body(rollout)
                if read is not None:
                    return read
        if not batch:
            raise UnknownRollout(f"group {group} of run {run_id} is not queued any more", batch=batch, group=group)
        raise UnknownRollout(
            f"group {group} of batch {batch} of run {run_id} is not among those that can be shown: the newest are, and "
            "those of batches that no checkpoint covers (--recent-bytes, --keep-batches)",
            batch=batch,
            group=group,
        )

    def _all(self, run_id: str) -> Iterator[Rollout]:
        """Yield the groups of a run, some without their body: queued ones, then those of batches, the newest first."""
        state = self._state
        open_run = state.runs.open
        if open_run is not None and open_run.run_id == run_id:
            yield from self._queued()
        kept = {number: batch for (owner, number), batch in self._recent if owner == run_id}
        stored = {}
        if open_run is not None and open_run.run_id == run_id:
            stored = {number: groups for one in (state.replayable, state.batches) for number, groups in one.items()}
        for number in sorted(kept.keys() | stored.keys(), reverse=True):
            batch = kept.get(number) or RecentBatch(stored[number])
            for index, row in enumerate(batch.rows):
                known = batch.groups.get(index)
                if known is not None or number in stored:
                    yield self._rollout(number, index, row, known.body if known is not None else b"", batch)

    def _queued(self) -> Iterator[Rollout]:
        lanes = [list(lane)[-MOST_QUEUED:] for lane in self._state.queue.lanes]
        newest = sorted(chain.from_iterable(lanes), key=lambda row: -row.seq)[:MOST_QUEUED]
        for row in newest:
            yield self._rollout(0, row.seq, row, b"", RecentBatch([]))

    def _rollout(self, number: int, index: int, row: GroupRow, body: bytes, batch: RecentBatch) -> Rollout:
        owner = self._state.environments.find(row.env_id)
        name = owner.display_name if owner is not None else f"environment {row.env_id}"
        return Rollout(number, index, row, body, name, tuple(batch.reports.values()), tuple(batch.rows))

    def _with_body(self, rollout: Rollout) -> Rollout | None:
        """Return the rollout with its body, or None if the store does not have it any more."""
        if rollout.body:
            return rollout
        if rollout.row.body == LOST:
            return None
        try:
            (body,) = self._state.bodies.read([rollout.row.body])
        except StoreDamaged:
            return None
        return replace(rollout, body=body)


def summarise(rollout: Rollout) -> GroupSummary:
    """Return the line of one group in a list; it reads a part of the body, so large lists belong in a thread."""
    line = read_line(rollout.body, rollout.row.form)
    return GroupSummary(
        batch=rollout.batch,
        group=rollout.group,
        environment_id=rollout.row.env_id,
        environment=rollout.environment,
        rewards=line.scores,
        tokens=rollout.row.token_count,
        oldest_version=rollout.row.oldest_version,
        arrived_at=rollout.row.arrived_at,
        equal_rewards=len(set(line.scores)) <= 1,
        has_values=bool(rollout.reports),
        remarks=remarks_of(line.overrides),
    )


def list_groups(run_id: str, rollouts: list[Rollout], order: Order, only: Only, limit: int) -> GroupList:
    """Return the first `limit` of the groups that fit `only`, in this order."""
    summaries = in_order([one for one in map(summarise, rollouts) if fits(one, only)], order)
    return GroupList(run_id=run_id, total=len(summaries), groups=summaries[:limit])


def token_values(rollout: Rollout) -> tuple[GroupValues | None, dict[str, str]]:
    """Return what the trainer reported about the tokens of a group, and the texts of its tokens."""
    values: GroupValues | None = None
    texts: dict[str, str] = {}
    for text in rollout.reports:
        report = msgspec.json.decode(text, type=TokenReport)
        texts |= report.texts
        mine = slice_for_rank(rollout.rows, report.rank, report.world_size)
        for group in report.groups:
            if group.group < len(mine) and mine[group.group].seq == rollout.row.seq:
                values = group
    return values, texts
