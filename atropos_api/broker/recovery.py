"""Putting a broker together again from what its store holds."""

from __future__ import annotations

import logging
from contextlib import suppress

from atropos_api.broker.batches import Batches
from atropos_api.broker.intake import Intake, Keys
from atropos_api.broker.repair import give_up
from atropos_api.broker.state import State
from atropos_api.errors import StoreDamaged
from atropos_api.store.base import LOST, NO_RUN, GroupRow, Snapshot
from atropos_api.store.steps import Step
from atropos_api.wire.payload import unseal

logger = logging.getLogger(__name__)


def recover(state: State, keys: Keys, intake: Intake, batches: Batches, snapshot: Snapshot) -> None:
    """Give each stored group its place: queue, formed batch, kept for replay, or left over from another run."""
    groups = sorted(snapshot.groups, key=lambda group: group.seq)
    missing = _mark_missing(state, groups)
    _place(state, groups)
    if missing:
        cut_short = _cut_short(groups, missing)
        lost = [group for group in groups if group.seq in missing or group.key_id in cut_short]
        logger.warning("%d groups are dropped: bodies are not in the log, the power went before an fsync", len(lost))
        with state.change():
            keys.withdraw(cut_short)
            give_up(state, batches, lost)
        gone = {group.seq for group in lost}
        groups = [group for group in groups if group.seq not in gone]
    keys.adopt(groups)
    unanswered = set(snapshot.unanswered)
    intake.repeats.adopt(snapshot.expected)
    _expect_repeats(state, intake, [group for group in groups if group.seq in unanswered])
    intake.resume(snapshot.unanswered)
    state.reach(Step.RECOVERED)


def _place(state: State, groups: list[GroupRow]) -> None:
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
    if run is not None:
        state.shown.update(number for number in state.batches if number <= run.handed_batch)


def _mark_missing(state: State, groups: list[GroupRow]) -> set[int]:
    """Give the groups whose bodies are not in the log no place in it; answers their seqs."""
    missing = set(state.bodies.adopt([group.body for group in groups if group.body != LOST]))
    marked = [group for group in groups if group.body in missing]
    for group in marked:
        group.body = LOST
    return {group.seq for group in marked}


def _cut_short(groups: list[GroupRow], missing: set[int]) -> set[int]:
    """Keys of submissions that lack a body and that no batch has any of.

    They may never have been answered. Dropped whole, with its key, each is taken again when its sender repeats it.
    """
    broken = {group.key_id for group in groups if group.seq in missing}
    members: dict[int, list[GroupRow]] = {}
    for group in groups:
        if group.key_id in broken:
            members.setdefault(group.key_id, []).append(group)
    return {key_id for key_id, rows in members.items() if key_id and not any(row.batch for row in rows)}


def _expect_repeats(state: State, intake: Intake, groups: list[GroupRow]) -> None:
    """What no answer is known of may be repeated by clients that saw none."""
    for group in groups:
        if group.body == LOST:
            continue
        with suppress(StoreDamaged):
            (body,) = state.bodies.read([group.body])
            intake.repeats.expect(group.env_id, *unseal(body, group.form))
