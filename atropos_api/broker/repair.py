"""Keeping the log of bodies in order while the broker runs: sparse segments rewritten, damaged bodies given up.

A damaged body is dropped, counted in `groups_lost_total` and shown as an event. A batch of which nobody has seen a byte
is formed anew without it. One that somebody may have seen keeps its other groups, and each rank its slice of them: to
form it anew would hand some groups out twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from atropos_api.broker.batches import Batches
from atropos_api.broker.state import State
from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import LOST, BodyRef, GroupRow
from atropos_api.store.steps import Step

logger = logging.getLogger(__name__)


class Repair:
    """Works on all groups that the store holds, wherever they stand."""

    def __init__(self, state: State, batches: Batches) -> None:
        self._state = state
        self._batches = batches
        self._copies: dict[BodyRef, BodyRef] = {}

    def compact(self) -> None:
        """Rewrite the few live bodies of mostly dead segments, so that the disk they hold comes back.

        The ledger points at the copies once those are safe: a later call, where that takes a sync. Whatever called for
        it is done already, so a disk that cannot take it now only means later.
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
        """Give up the groups whose bodies are damaged."""
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
        state.reach(Step.COMPACTION_COPIED)

    def _move_to_copies(self) -> None:
        state = self._state
        copies = self._copies
        rows = [row for row in self._all_groups() if row.body in copies]
        state.ledger.move_groups((row.seq, copies[row.body]) for row in rows)
        state.reach(Step.COMPACTION_KEPT)
        self._copies = {}
        needed = {row.body for row in rows}
        for row in rows:
            row.body = copies[row.body]
        state.bodies.discard(needed)
        # Groups that left in the meantime need no copy either.
        state.bodies.discard([new for old, new in copies.items() if old not in needed])
        state.reach(Step.COMPACTION_ENDED)

    def _all_groups(self) -> Iterable[GroupRow]:
        state = self._state
        for lane in state.queue.lanes:
            yield from lane
        for numbered in (state.batches, state.kept):
            for groups in numbered.values():
                yield from groups
        for groups in state.left_over.values():
            yield from groups


def give_up(state: State, batches: Batches, lost: Iterable[GroupRow]) -> None:
    """Take groups without a body from wherever they stand; the caller gives the transaction."""
    gone = {group.seq: group for group in lost}
    state.counters.groups_lost_total += len(gone)
    state.drops.count(gone.values(), "damaged")
    for number, groups in list(state.batches.items()):
        affected = [group for group in groups if group.seq in gone]
        whole = any(group.seq not in gone and group.body != LOST for group in groups)
        if affected and number in state.shown and whole:
            _leave_gaps(state, affected)
            for group in affected:
                del gone[group.seq]
        elif affected:
            batches.dissolve([number])
    queued = [row for lane in state.queue.lanes for row in lane if row.seq in gone]
    batches.drop(queued)
    for row in queued:
        del gone[row.seq]
    batches.forget(list(gone.values()))
    state.kept = {n: [row for row in rows if row.seq not in gone] for n, rows in state.kept.items()}
    state.left_over = {run: [row for row in rows if row.seq not in gone] for run, rows in state.left_over.items()}


def _leave_gaps(state: State, groups: list[GroupRow]) -> None:
    state.ledger.move_groups((group.seq, LOST) for group in groups)
    state.discard([group.body for group in groups])
    for group in groups:
        group.body = LOST
