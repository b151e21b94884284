"""Putting a broker together again from what its store holds."""

from __future__ import annotations

import logging

from atropos_api.broker.intake import Intake, Keys
from atropos_api.broker.state import State
from atropos_api.store.base import NO_RUN, GroupRow, Snapshot
from atropos_api.wire.payload import unseal

logger = logging.getLogger(__name__)


def recover(state: State, keys: Keys, intake: Intake, snapshot: Snapshot) -> None:
    """Give each stored group its place: queue, formed batch, kept for replay, or left over from another run."""
    groups = _without_lost(state, sorted(snapshot.groups, key=lambda group: group.seq))
    keys.adopt(groups)
    run = state.runs.open
    own = {NO_RUN, run.run_id if run is not None else NO_RUN}
    for group in groups:
        if group.run_id not in own:
            state.left_over.setdefault(group.run_id, []).append(group)
        elif run is not None and group.batch > run.committed_batch:
            state.batches.setdefault(group.batch, []).append(group)
        elif group.batch:
            state.kept.setdefault(group.batch, []).append(group)
        else:
            state.queue.add(group)
    intake.answered_seq = snapshot.answered_seq
    _expect_repeats(state, intake, [group for group in groups if group.seq > snapshot.answered_seq])


def _without_lost(state: State, groups: list[GroupRow]) -> list[GroupRow]:
    """Rows whose body did not survive (the power went before an fsync) are dropped, and said so."""
    lost = set(state.bodies.adopt([group.body for group in groups]))
    if not lost:
        return groups
    gone = [group for group in groups if group.body in lost]
    state.ledger.drop_groups([group.seq for group in gone])
    state.counters.groups_lost_total += len(gone)
    logger.warning("%d groups have no body in the log and are lost: the power went before an fsync", len(gone))
    return [group for group in groups if group.body not in lost]


def _expect_repeats(state: State, intake: Intake, groups: list[GroupRow]) -> None:
    """The last submissions before a crash may be repeated by clients that saw no answer."""
    now = state.clock()
    unkeyed = [group for group in groups if not group.key_id]
    for group, body in zip(unkeyed, state.bodies.read([group.body for group in unkeyed]), strict=True):
        intake.repeats.expect(group.env_id, unseal(body), now)
