"""Bugs to plant: each breaks one promise of the broker or of the environments, as a careless change would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from atropos_api.broker import batches, broker, items, recovery, runs, submissions
from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import LOST

from . import disk

Plant = Callable[[pytest.MonkeyPatch], None]


def lose_leases_of_killed_processes(patch: pytest.MonkeyPatch) -> None:
    original = items.Items._items_of

    def of(self: Any, row: Any, run_id: str, process: str) -> Any:
        return msgspec.structs.replace(original(self, row, run_id, process), returned=())

    patch.setattr(items.Items, "_items_of", of)


def take_calls_of_superseded_trainers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "_check_epoch", lambda run, epoch: None)


def forget_which_groups_a_batch_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.SimulatedLedger, "assign_batch", lambda self, seqs, batch: None)


def forget_keys_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.SimulatedLedger, "put_key", lambda self, row: None)


def take_a_repeated_submission_as_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(submissions.IdempotencyKeys, "find", lambda self, owner, key: None)


def hand_out_a_batch_in_another_order_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    original = recovery._place
    patch.setattr(recovery, "_place", lambda state, groups: original(state, groups[::-1]))


def acknowledge_what_was_not_written(patch: pytest.MonkeyPatch) -> None:
    original = disk.SimulatedLedger.add_submission

    def add(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            original(self, *arguments, **named)
        except StoreUnavailable:
            return

    patch.setattr(disk.SimulatedLedger, "add_submission", add)


def keep_half_of_a_transaction(patch: pytest.MonkeyPatch) -> None:
    def stage(self: Any, write: Callable[[], None]) -> None:
        self._staged.append(write)
        self._commit()

    patch.setattr(disk.SimulatedLedger, "_stage", stage)


def trust_memory_after_a_failed_write(patch: pytest.MonkeyPatch) -> None:
    def rebuild(self: Any) -> None:
        self.state.store_inconsistent = False

    patch.setattr(broker.Broker, "rebuild", rebuild)


def commit_one_batch_too_many(patch: pytest.MonkeyPatch) -> None:
    original = batches.Batches.commit

    def commit(self: Any, run: Any, number: int) -> None:
        original(self, run, min(number + 1, run.formed_batch))

    patch.setattr(batches.Batches, "commit", commit)


def give_late_groups_to_the_next_run(patch: pytest.MonkeyPatch) -> None:
    original = broker.Broker.take
    patch.setattr(
        broker.Broker, "take", lambda self, env, groups, key=None, run_id=None: original(self, env, groups, key=key)
    )


def count_lost_groups_as_trained(patch: pytest.MonkeyPatch) -> None:
    original = batches.Batches.commit

    def commit(self: Any, run: Any, number: int) -> None:
        for groups in self._state.batches.values():
            groups[0].body = LOST if number % 6 == 0 else groups[0].body
        original(self, run, number)

    patch.setattr(batches.Batches, "commit", commit)


PLANTS: Mapping[str, Plant] = {
    name: plant
    for name, plant in globals().items()
    if callable(plant) and getattr(plant, "__module__", "") == __name__ and name.islower()
}
