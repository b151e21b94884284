"""The Atropos contract on top of numbered batches: one trainer that acknowledges nothing, environments that poll.

A batch handed out by `next_batch` is committed by the call after it, but only if its last byte was accepted by the
transport; otherwise the same batch is answered again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Annotated

import msgspec

from atropos_api.broker.batches import max_staleness_of
from atropos_api.broker.broker import Broker
from atropos_api.broker.state import State
from atropos_api.broker.units import batch_in_sequences, queued_by_environment
from atropos_api.errors import BrokerError, InvalidGroup
from atropos_api.store.base import EnvironmentRow, GroupRow, RunRow
from atropos_api.wire.messages import EnvironmentRequest, NotNegative, Positive
from atropos_api.wire.payload import CheckedGroup, Fields, check_group

logger = logging.getLogger(__name__)

ASSUMED_MAX_BATCHES_OFFPOLICY = 3
"""Legacy environments do not say theirs; this is their default."""

LEAST_WEIGHT = 0.01


class LegacyRegistration(msgspec.Struct, kw_only=True):
    """Body of `POST /register`; `batch_size` counts sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: Positive
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: NotNegative
    num_steps: int


class LegacyEnvironment(msgspec.Struct, kw_only=True):
    """Body of `POST /register-env`."""

    max_token_length: int
    desired_name: Annotated[str, msgspec.Meta(max_length=200)]
    weight: float
    group_size: Positive
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None


class StatusEnv(msgspec.Struct, kw_only=True):
    """Answer of `GET /status-env`; sizes are in groups of the environment that asks."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class Taken(msgspec.Struct, kw_only=True):
    """What became of a legacy submission. `refused` pairs places in the list with their errors."""

    rows: list[GroupRow]
    duplicates: int
    refused: list[tuple[int, BrokerError]]
    buffered: int
    last_buffer_size: int
    repeatable: list[tuple[int | None, bytes]]


class LegacyContract:
    """The rules that only callers of the Atropos contract meet."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _state(self) -> State:
        return self._broker.state

    def register(self, wanted: LegacyRegistration) -> int:
        """Begin a run, or reconnect to the open one with the same names; an uncommitted batch is offered again."""
        run = self._state.runs.open
        if run is not None and run.legacy and _same_trainer(run, wanted):
            self._reconnect(run, wanted)
        else:
            self._broker.open_new_run(_make_run(wanted, self._state.clock()))
        self._state.events.add("run-began", run_id=self._state.runs.require_open().run_id, legacy=True)
        self._state.pacing_changed()
        # Fits the integers of every JSON reader, unlike a whole UUID.
        return uuid.uuid4().int >> 75

    def register_environment(self, wanted: LegacyEnvironment) -> tuple[EnvironmentRow, RunRow] | None:
        """None until a trainer has registered and asked for its first batch."""
        run = self._state.runs.open
        if run is None or not run.started:
            return None
        request = EnvironmentRequest(
            name=wanted.desired_name or "environment",
            group_size=wanted.group_size,
            max_token_length=wanted.max_token_length,
            weight=wanted.weight,
            min_batch_allocation=wanted.min_batch_allocation,
        )
        self._broker.check_group_size(request)
        row = self._state.environments.register_legacy(request, self._state.clock())
        self._broker.touch(row)
        self._state.events.add("environment-registered", environment_id=row.environment_id, name=row.display_name)
        self._state.pacing_changed()
        return row, run

    def take(self, items: Sequence[Fields], *, key: str | None = None, where: str = "") -> Taken:
        """Take every valid group of a list; an invalid one costs its neighbours nothing."""
        groups: list[CheckedGroup] = []
        refused: list[tuple[int, BrokerError]] = []
        for index, fields in enumerate(items):
            try:
                group = check_group(fields, where=where.format(index=index))
                self._broker.intake.check_version(group, where.format(index=index))
                groups.append(group)
            except InvalidGroup as error:
                refused.append((index, error))
        self._state.counters.groups_refused_total += len(refused)
        fresh, duplicates = self._sort_out_repeats(groups, key)
        rows = self._store(fresh, key)
        if duplicates:
            self._state.counters.groups_duplicate_total += duplicates
            logger.info("%d groups are repeats of what was taken before; not taken again", duplicates)
        buffered, buffer_size = self._count_buffered(rows)
        return Taken(
            rows=rows,
            duplicates=duplicates,
            refused=refused,
            buffered=buffered,
            last_buffer_size=buffer_size,
            repeatable=[] if key else [(group.env_id, group.text) for group in fresh],
        )

    def expect_repeat(self, taken: Taken) -> None:
        """The answer did not get through: the same bytes again are a repeat."""
        now = self._state.clock()
        for env_id, text in taken.repeatable:
            self._broker.intake.repeats.expect(env_id, text, now)

    def next_batch(self) -> tuple[RunRow, list[GroupRow]] | None:
        """Commit what was delivered, and give the batch after it; None while it cannot be formed."""
        run = self._state.runs.require_open()
        if run.handed_batch > run.committed_batch and run.delivered:
            self._broker.commit(run.handed_batch)
            run = self._state.runs.require_open()
        number = run.committed_batch + 1
        groups = self._broker.batches.obtain(run, number)
        run = self._state.runs.require_open()
        if groups is None:
            if not run.started:
                self._state.runs.change(run, started=True)
            return None
        if number > run.handed_batch:
            self._state.counters.batches_handed_total += 1
        run = self._state.runs.change(run, handed_batch=number, delivered=False, started=True)
        return run, groups

    def confirm_delivery(self, run_id: str, number: int) -> None:
        """The transport accepted the last byte of this batch."""
        run = self._state.runs.open
        if run is not None and run.run_id == run_id and run.handed_batch == number:
            self._state.runs.change(run, delivered=True)

    def status_env(self, environment_id: int) -> StatusEnv:
        row = self._state.environments.get(environment_id)
        self._broker.touch(row)
        run = self._state.runs.open
        alive = self._state.alive_environments()
        queued = self._queued_by_environment(run)
        largest = max(self._state.queue.groups_by_size, default=1)
        group_size = max(row.group_size, self._state.queue.largest_size_of(environment_id))
        own = queued.get(environment_id, 0)
        others = sum(
            self._share_of_other(other, sequences, largest, run)
            for other, sequences in queued.items()
            if other != environment_id
        )
        return StatusEnv(
            current_step=self._current_step(row, run),
            queue_size=self._with_pressure((own + others) // group_size, group_size, run),
            unallocated_fraction=1.0 - min(1.0, sum(other.min_batch_allocation or 0.0 for other in alive)),
            self_queue_size=own // group_size,
            max_group_size=largest,
            env_weight=_weight_of(row, alive),
        )

    def batch_sequences(self, run: RunRow) -> int:
        """The batch size in sequences, all that callers of this contract know."""
        return batch_in_sequences(run, self._usual_size())

    def reset(self) -> None:
        """End the open run and forget the environments. The run's groups stay on disk as left over."""
        run = self._state.runs.open
        if run is not None:
            self._broker.close_run(run)
        elif self._state.queue.groups:
            self._broker.batches.drop([group for lane in self._state.queue.lanes for group in lane])
        self._state.environments.disconnect_all()
        self._state.latest_body = None
        self._state.events.add("reset")
        self._state.pacing_changed()

    def _reconnect(self, run: RunRow, wanted: LegacyRegistration) -> None:
        with self._state.change():
            self._replace_config(run, wanted)

    def _replace_config(self, run: RunRow, wanted: LegacyRegistration) -> None:
        batches = self._state.batches
        unfit = [n for n, groups in batches.items() if sum(group.size for group in groups) != wanted.batch_size]
        self._broker.batches.dissolve(unfit)
        formed = max(batches, default=run.committed_batch)
        starting_step = wanted.starting_step - run.committed_batch if wanted.starting_step else run.starting_step
        self._state.runs.change(
            run,
            batch_size=wanted.batch_size,
            max_token_length=wanted.max_token_len,
            num_steps=wanted.num_steps,
            checkpoint_interval=wanted.save_checkpoint_interval,
            starting_step=starting_step,
            formed_batch=formed,
            handed_batch=min(run.handed_batch, formed),
            delivered=False,
        )

    def _sort_out_repeats(self, groups: Sequence[CheckedGroup], key: str | None) -> tuple[list[CheckedGroup], int]:
        if key is not None:
            used = bool(groups) and self._broker.keys.find(self._owner(groups[0]), key) is not None
            return ([], len(groups)) if used else (list(groups), 0)
        now = self._state.clock()
        recognise = self._broker.intake.repeats.recognise
        fresh = [group for group in groups if not recognise(group.env_id, group.text, now)]
        return fresh, len(groups) - len(fresh)

    def _store(self, groups: Sequence[CheckedGroup], key: str | None) -> list[GroupRow]:
        if not groups:
            return []
        known = [self._state.environments.find(group.env_id) for group in groups]
        for row in known:
            if row is not None:
                self._broker.touch(row)
        self._state.counters.groups_unregistered_total += sum(row is None for row in known)
        key_row = self._broker.keys.make(self._owner(groups[0]), key, len(groups)) if key is not None else None
        run_id = self._broker.run_for(known[0])
        return self._broker.intake.take(groups, [group.env_id for group in groups], run_id=run_id, key=key_row)

    def _owner(self, group: CheckedGroup) -> str:
        row = self._state.environments.find(group.env_id)
        return row.display_name if row is not None else f"environment {group.env_id}"

    def _count_buffered(self, rows: Sequence[GroupRow]) -> tuple[int, int]:
        """Groups that no batch can use yet, and the sequences of the last one's environment that wait like it."""
        waiting = []
        for group in rows:
            environment = self._state.environments.find(group.env_id)
            if not self._broker.can_be_used(group.size, environment.group_size if environment else None):
                waiting.append(group)
        self._state.counters.groups_unpackable_total += len(waiting)
        if not waiting:
            return 0, 0
        lanes = self._state.queue.lanes_of(waiting[-1].env_id)
        environment = self._state.environments.find(waiting[-1].env_id)
        registered = environment.group_size if environment is not None else None
        sizes = [lane.size * len(lane) for lane in lanes if not self._broker.can_be_used(lane.size, registered)]
        return len(waiting), sum(sizes)

    def _queued_by_environment(self, run: RunRow | None) -> dict[int | None, int]:
        """Sequences by environment; under a v1 run formed batches count too, or prefetching would look like hunger."""
        if run is None:
            return dict(self._state.queue.sequences_by_env)
        one = batch_in_sequences(run, self._usual_size()) // run.batch_size
        queued = {owner: one * count for owner, count in queued_by_environment(run, self._state.queue.lanes).items()}
        for size in self._broker.batches.unpackable_sizes(run):
            for lane in self._state.queue.lanes_of_size(size):
                queued[lane.env_id] -= size * len(lane)
        if not run.legacy:
            trained = self._broker.trained_steps(run)
            for number, groups in self._state.batches.items():
                for group in groups if number > trained else ():
                    counted = group.size if run.unit == "sequences" else one
                    queued[group.env_id] = queued.get(group.env_id, 0) + counted
        return queued

    def _usual_size(self) -> int:
        """The group size by which a run that counts groups is told to environments that count sequences."""
        return max(self._state.registered_sizes(), default=1)

    def _share_of_other(self, env_id: int | None, sequences: int, largest: int, run: RunRow | None) -> int:
        """Another environment's queue, in whole packs, less what its own minimum will take."""
        packed = -(-sequences // largest) * largest
        row = self._state.environments.find(env_id)
        if row is None or run is None or not row.min_batch_allocation:
            return packed
        return max(0, packed - int(self.batch_sequences(run) * row.min_batch_allocation))

    def _with_pressure(self, queue_size: int, group_size: int, run: RunRow | None) -> int:
        """Legacy environments heed nothing but this number: it grows before the queue is full or the groups too old.

        It stays below what would make them believe that the run is over.
        """
        if run is None:
            return queue_size
        reported = queue_size
        batch_sequences = self.batch_sequences(run)
        budget = max_staleness_of(self._state, run)
        if budget is not None and budget + 1 < ASSUMED_MAX_BATCHES_OFFPOLICY:
            reported = -(-queue_size * ASSUMED_MAX_BATCHES_OFFPOLICY // (budget + 1))
        if self._broker.under_pressure():
            reported = max(reported, ASSUMED_MAX_BATCHES_OFFPOLICY * 10 * batch_sequences // group_size)
        steps_left = run.num_steps - self._broker.trained_steps(run)
        believable = max(queue_size, ((steps_left + 1) * batch_sequences - 1) // group_size)
        return min(reported, believable) if run.num_steps > 0 else reported

    def _current_step(self, row: EnvironmentRow, run: RunRow | None) -> int:
        if run is not None:
            return self._broker.trained_steps(run)
        if row.run_id is None or not self._state.runs.has_finished(row.run_id):
            return 0
        # Above the total, which is what makes a legacy environment stop.
        return self._state.runs.find(row.run_id).num_steps + 1


def _same_trainer(run: RunRow, wanted: LegacyRegistration) -> bool:
    names = (wanted.wandb_project, wanted.wandb_group, wanted.checkpoint_dir)
    return names == (run.wandb_project, run.wandb_group, run.checkpoint_dir)


def _make_run(wanted: LegacyRegistration, now: float) -> RunRow:
    return RunRow(
        run_id=f"run-{uuid.uuid4().hex[:12]}",
        name=wanted.wandb_group or "legacy",
        legacy=True,
        state="open",
        epoch=1,
        batch_size=wanted.batch_size,
        max_token_length=wanted.max_token_len,
        num_steps=wanted.num_steps,
        starting_step=wanted.starting_step,
        checkpoint_dir=wanted.checkpoint_dir,
        checkpoint_interval=wanted.save_checkpoint_interval,
        wandb_project=wanted.wandb_project,
        wandb_group=wanted.wandb_group,
        max_staleness=None,
        began_at=now,
        started=False,
    )


def _weight_of(row: EnvironmentRow, alive: Sequence[EnvironmentRow]) -> float:
    """Share of tokens by weight; alone, or when nobody has a weight, an equal share."""
    shares = {other.environment_id: other.max_token_length * max(0.0, other.weight) for other in alive}
    total = sum(shares.values())
    if total <= 0:
        return 1.0 / max(1, len(alive))
    return max(LEAST_WEIGHT, shares.get(row.environment_id, 0.0) / total)
