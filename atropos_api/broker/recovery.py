"""Recovery of the broker's state: at start, after damage to the body log, and by compaction.

`recover` rebuilds the state from what the store holds. `Repair` rewrites sparse segments while the broker runs, and
drops groups whose bodies are damaged; these are counted in `groups_lost_total` and reported as an event. A batch of
which no caller has received a byte is formed again without them. A batch that a caller may have received keeps its
other groups, and each rank keeps its slice of them: forming it again would hand some groups out twice. The run itself,
and whether its trainer is taken to be at work, are set by `broker.Broker`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from atropos_api.broker.batches import Batches
from atropos_api.broker.state import State
from atropos_api.broker.submissions import IdempotencyKeys, Submissions
from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import LOST, NO_RUN, BodyRef, GroupRow, Snapshot
from atropos_api.store.failpoints import Failpoint
from atropos_api.wire.group_json import restore_text

logger = logging.getLogger(__name__)


class Repair:
    """Compaction of the body log and removal of damaged groups: queued, batched, kept for replay or left over."""

    def __init__(self, state: State, batches: Batches) -> None:
        self._state = state
        self._batches = batches
        self._copies: dict[BodyRef, BodyRef] = {}

    def compact(self) -> None:
        """Rewrite the few live bodies of mostly dead segments, so that the disk space of those segments is freed.

        The ledger points at the copies once those are safe; where that takes a sync, a later call does it. The commit
        that calls this is complete already, so a disk that cannot take the copies now only delays them.
        """
        try:
            if not self._copies:
                self._copy_sparse()
            if self._copies and self._state.bodies.is_safe(self._copies.values()):
                self._move_to_copies()
        except StoreUnavailable as error:
            logger.warning("segments were not rewritten, the next commit tries again: %s", error)
        except StoreDamaged as error:
            self.lose(error)

    def lose(self, error: StoreDamaged) -> None:
        """Drop the groups whose bodies are damaged."""
        refs = set(error.refs)
        lost = [row for row in self._all_groups() if row.body in refs]
        logger.error("%s; %d groups are lost", error, len(lost))
        with self._state.change():
            give_up(self._state, self._batches, lost)
        self._state.events.add("groups-lost", groups=len(lost), reason=str(error))

    def _copy_sparse(self) -> None:
        state = self._state
        sparse = set(state.bodies.sparse_segments())
        if not sparse:
            return
        old = [row.body for row in self._all_groups() if row.body.segment in sparse]
        new = state.bodies.append(state.bodies.read(old))
        self._copies = dict(zip(old, new, strict=True))
        state.reach(Failpoint.COMPACTION_COPIED)

    def _move_to_copies(self) -> None:
        state = self._state
        copies = self._copies
        rows = [row for row in self._all_groups() if row.body in copies]
        state.ledger.move_groups((row.seq, copies[row.body]) for row in rows)
        state.reach(Failpoint.COMPACTION_KEPT)
        self._copies = {}
        needed = {row.body for row in rows}
        for row in rows:
            row.body = copies[row.body]
        state.bodies.discard(needed)
        # Groups that were dropped in the meantime need no copy either.
        state.bodies.discard([new for old, new in copies.items() if old not in needed])
        state.reach(Failpoint.COMPACTION_ENDED)

    def _all_groups(self) -> Iterable[GroupRow]:
        state = self._state
        for lane in state.queue.lanes:
            yield from lane
        for numbered in (state.batches, state.replayable):
            for groups in numbered.values():
                yield from groups
        for groups in state.left_over.values():
            yield from groups


def give_up(state: State, batches: Batches, lost: Iterable[GroupRow]) -> None:
    """Remove groups without a body from wherever they are stored; the caller provides the transaction."""
    gone = {group.seq: group for group in lost}
    state.counters.groups_lost_total += len(gone)
    state.drops.count(gone.values(), "damaged")
    for number, groups in list(state.batches.items()):
        affected = [group for group in groups if group.seq in gone]
        whole = any(group.seq not in gone and group.body != LOST for group in groups)
        if affected and number in state.possibly_delivered and whole:
            _leave_gaps(state, affected)
            for group in affected:
                del gone[group.seq]
        elif affected:
            batches.dissolve([number])
    queued = [row for lane in state.queue.lanes for row in lane if row.seq in gone]
    batches.drop(queued, "damaged")
    for row in queued:
        del gone[row.seq]
    batches.forget(list(gone.values()), "damaged")
    state.replayable = {n: [row for row in rows if row.seq not in gone] for n, rows in state.replayable.items()}
    state.left_over = {run: [row for row in rows if row.seq not in gone] for run, rows in state.left_over.items()}


def _leave_gaps(state: State, groups: list[GroupRow]) -> None:
    state.ledger.move_groups((group.seq, LOST) for group in groups)
    state.environments.count_outcome("damaged", groups)
    state.discard([group.body for group in groups])
    for group in groups:
        group.body = LOST


def recover(
    state: State, keys: IdempotencyKeys, submissions: Submissions, batches: Batches, snapshot: Snapshot
) -> None:
    """Put each stored group in its place: queue, formed batch, kept for replay, or left over from another run."""
    groups = sorted(snapshot.groups, key=lambda group: group.seq)
    missing = _mark_missing(state, groups)
    _place(state, groups)
    if missing:
        cut_short = _cut_short(groups, missing)
        lost = [group for group in groups if group.seq in missing or group.key_id in cut_short]
        logger.warning("%d groups are dropped: bodies are missing, as after a power failure before an fsync", len(lost))
        with state.change():
            keys.withdraw(cut_short)
            give_up(state, batches, lost)
        gone = {group.seq for group in lost}
        groups = [group for group in groups if group.seq not in gone]
    keys.adopt(groups)
    unanswered = set(snapshot.unanswered)
    submissions.repeats.adopt(snapshot.expected)
    _expect_repeats(state, submissions, [group for group in groups if group.seq in unanswered])
    submissions.resume(snapshot.unanswered)
    state.reach(Failpoint.RECOVERED)


def _place(state: State, groups: list[GroupRow]) -> None:
    run = state.runs.open
    own = {NO_RUN, run.run_id if run is not None else NO_RUN}
    for group in groups:
        if group.run_id not in own:
            state.left_over.setdefault(group.run_id, []).append(group)
        elif run is not None and group.batch > run.committed_batch:
            state.batches.setdefault(group.batch, []).append(group)
        elif group.batch:
            state.replayable.setdefault(group.batch, []).append(group)
        else:
            state.queue.add(group)
    if run is not None:
        state.possibly_delivered.update(number for number in state.batches if number <= run.handed_batch)


def _mark_missing(state: State, groups: list[GroupRow]) -> set[int]:
    """Mark the groups whose bodies are not in the log as `LOST`; return their seqs."""
    missing = set(state.bodies.adopt([group.body for group in groups if group.body != LOST]))
    marked = [group for group in groups if group.body in missing]
    for group in marked:
        group.body = LOST
    return {group.seq for group in marked}


def _cut_short(groups: list[GroupRow], missing: set[int]) -> set[int]:
    """Return the keys of submissions that lack a body and of which no group is in a batch.

    They may never have been answered. Each submission is dropped whole, with its key, so that a repeat is accepted.
    """
    broken = {group.key_id for group in groups if group.seq in missing}
    members: dict[int, list[GroupRow]] = {}
    for group in groups:
        if group.key_id in broken:
            members.setdefault(group.key_id, []).append(group)
    return {key_id for key_id, rows in members.items() if key_id and not any(row.batch for row in rows)}


def _expect_repeats(state: State, submissions: Submissions, groups: list[GroupRow]) -> None:
    """Expect repeats of groups whose answer may not have arrived: their clients may send them again."""
    for group in groups:
        if group.body == LOST:
            continue
        with suppress(StoreDamaged):
            (body,) = state.bodies.read([group.body])
            submissions.repeats.expect(group.env_id, *restore_text(body, group.form))
