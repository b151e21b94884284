"""The Atropos contract on top of numbered batches: its trainer acknowledges nothing, and its environments poll.

A batch handed out by `next_batch` is committed by the next call, but only if the transport accepted its last byte;
otherwise the same batch is returned again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from atropos_api.broker import runs
from atropos_api.broker.broker import Broker
from atropos_api.broker.queue import QueueLane
from atropos_api.broker.run_succession import named
from atropos_api.broker.state import State
from atropos_api.broker.status import AtroposStatus
from atropos_api.errors import BrokerError, InvalidGroup, StoreUnavailable
from atropos_api.store.base import LOST, EnvironmentRow, GroupRow, RunRow
from atropos_api.wire.group_json import CheckedGroup, Fields, check_group
from atropos_api.wire.group_json_small import check_body
from atropos_api.wire.messages import EnvironmentRequest, NotNegative, Positive, RunRequest, Weight, Whole

logger = logging.getLogger(__name__)

NAMELESS: Final = "legacy"
"""Name of the run of a trainer that names no group."""

WAIT_FOR_TRAINER: Final = "wait for trainer to start"


class LegacyRegistration(msgspec.Struct, kw_only=True):
    """Body of `POST /register`; `batch_size` counts sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: Positive
    max_token_len: Whole
    checkpoint_dir: str
    save_checkpoint_interval: Whole
    starting_step: NotNegative
    num_steps: Whole


class LegacyEnvironment(msgspec.Struct, kw_only=True):
    """Body of `POST /register-env`."""

    max_token_length: Whole
    desired_name: Annotated[str, msgspec.Meta(max_length=200)]
    weight: Weight
    group_size: Positive
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None


class CheckedGroups(msgspec.Struct, kw_only=True):
    """The groups of a list that may be queued. `refused` pairs the index of each other group with its error."""

    groups: list[CheckedGroup]
    refused: list[tuple[int, BrokerError]]


class V0Receipt(msgspec.Struct, kw_only=True):
    """The outcome of a legacy submission; `refused` is that of `CheckedGroups`."""

    rows: list[GroupRow]
    duplicates: int
    refused: list[tuple[int, BrokerError]]
    buffered: int
    last_buffer_size: int
    repeatable: list[CheckedGroup]
    """Groups that came without a key, repeats included."""
    repeated: list[CheckedGroup]
    """The repeats among `repeatable`."""


class AtroposContract:
    """The rules that apply only to callers of the Atropos contract."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.status = AtroposStatus(broker)

    @property
    def _state(self) -> State:
        return self._broker.state

    def register(self, wanted: LegacyRegistration) -> int:
        """Begin a run, or reconnect to the open one with the same names; an uncommitted batch is offered again.

        A run that is over, or whose trainer has long been silent, is not continued: the same command then begins a new
        run.
        """
        run, now = self._state.runs.open, self._state.clock()
        same = run is not None and run.legacy and _same_trainer(run, wanted)
        if run is not None and same and not (runs.is_over(run) or runs.has_gone(run, now)):
            self._reconnect(run, wanted)
        else:
            if not same:
                self._broker.succession.refuse_rival(wanted.wandb_group or NAMELESS)
            self._broker.succession.begin_new(_make_run(wanted, now))
        # 53 bits fit the integers of every JSON reader, unlike a whole UUID.
        return uuid.uuid4().int >> 75

    def register_environment(self, wanted: LegacyEnvironment) -> tuple[EnvironmentRow, RunRow] | str:
        """Return the environment and its run, or the reason to wait; the environment asks again each second.

        It waits for a trainer that has registered and asked for its first batch, or for another environment without
        whose groups its own fill no batch.
        """
        run = self._state.runs.open
        if run is None or not run.started:
            return WAIT_FOR_TRAINER
        request = EnvironmentRequest(
            name=wanted.desired_name or "environment",
            group_size=wanted.group_size,
            max_token_length=wanted.max_token_length,
            weight=wanted.weight,
            min_batch_allocation=wanted.min_batch_allocation,
        )
        self._broker.sizes.refuse_too_large(request.group_size)
        obstacle = self._broker.sizes.ask(request.name, request.group_size)
        if obstacle is not None:
            return f"wait: {obstacle}"
        row = self._state.environments.register_legacy(request, self._state.clock())
        self._broker.touch(row)
        self._broker.sizes.warn()
        self._state.events.add("environment-registered", environment_id=row.environment_id, name=row.display_name)
        self._state.pacing_changed()
        return row, run

    def check(self, items: Sequence[Fields], *, where: str = "") -> CheckedGroups:
        """Validate each group of a list on its own; reads nothing that changes, so any thread may call it."""
        checked = CheckedGroups(groups=[], refused=[])
        for index, fields in enumerate(items):
            place = where.format(index=index)
            try:
                group = check_group(fields, where=place)
                self._broker.submissions.check(group, place)
                checked.groups.append(group)
            except InvalidGroup as error:
                checked.refused.append((index, error))
        return checked

    def check_one(self, body: bytes) -> CheckedGroups:
        """Validate, as `check` does, a group that is a body of its own."""
        try:
            group = check_body(body)
            self._broker.submissions.check(group, "")
        except InvalidGroup as error:
            return CheckedGroups(groups=[], refused=[(0, error)])
        return CheckedGroups(groups=[group], refused=[])

    def take(self, items: Sequence[Fields], *, key: str | None = None, where: str = "") -> V0Receipt:
        """Accept every valid group of a list; an invalid one does not affect the others."""
        return self.take_checked(self.check(items, where=where), key=key)

    def take_checked(self, checked: CheckedGroups, *, key: str | None = None) -> V0Receipt:
        groups = checked.groups
        owner = self._owner(groups[0]) if key is not None and groups else ""
        fresh, repeated = self._sort_out_repeats(groups, owner, key)
        try:
            rows = self._store(fresh, owner, key)
        except BrokerError:
            # Nothing of the list was accepted: it will come again, and its repeats must be recognised again.
            if not key:
                self._broker.submissions.settle([], repeated, lost=repeated)
            raise
        self._broker.batches.count_unpackable(rows)
        if repeated:
            self._state.counters.groups_duplicate_total += len(repeated)
            logger.info("%d groups repeat groups that were accepted before; they are not accepted again", len(repeated))
        buffered, buffer_size = self._count_buffered(rows)
        return V0Receipt(
            rows=rows,
            duplicates=len(repeated),
            refused=checked.refused,
            buffered=buffered,
            last_buffer_size=buffer_size,
            repeatable=[] if key else groups,
            repeated=[] if key else repeated,
        )

    def settle(self, taken: V0Receipt, *, arrived: bool = True) -> None:
        """Record that the answer was sent or, unless it `arrived`, that the same bytes may come again as a repeat."""
        self._broker.submissions.settle(taken.rows, taken.repeated, lost=() if arrived else taken.repeatable)

    def next_batch(self) -> tuple[RunRow, list[GroupRow]] | None:
        """Commit the delivered batch and return the batch after it; None while that cannot be formed."""
        run = self._broker.trainer_called()
        if run.handed_batch > run.committed_batch and run.delivered:
            self._broker.commit(run.handed_batch)
            run = self._state.runs.require_open()
        number = run.committed_batch + 1
        groups = self._broker.batches.obtain(run, number)
        run = self._state.runs.require_open()
        if groups is None:
            self._state.activity.batch_wait.note(self._state.clock(), number)
            if not run.started:
                self._state.runs.change(run, started=True)
            return None
        if number > run.handed_batch:
            self._state.counters.batches_handed_total += 1
        run = self._state.runs.change(run, handed_batch=number, delivered=False, started=True)
        return run, [group for group in groups if group.body != LOST]

    def confirm_delivery(self, run_id: str, number: int) -> None:
        """Record that the transport accepted the last byte of this batch."""
        run = self._state.runs.open
        if run is None or run.run_id != run_id or run.handed_batch != number:
            return
        try:
            self._state.runs.change(run, delivered=True)
        except StoreUnavailable:
            # Kept in memory while this process runs, and written with the run's next change.
            run.delivered = True

    def reset(self) -> None:
        """End the open run and disconnect the environments. The run's groups stay on disk as left over."""
        run, now = self._state.runs.open, self._state.clock()
        if run is not None:
            quiet = runs.quiet_seconds(run, now)
            self._broker.succession.close(run)
            logger.warning("%s was ended by GET /reset_data; its trainer asked %.0f s ago", named(run), quiet)
        elif self._state.queue.groups:
            self._broker.batches.drop([group for lane in self._state.queue.lanes for group in lane], "reset")
        self._state.environments.disconnect_all()
        self._state.latest_body = None
        self._state.events.add("reset")
        self._state.pacing_changed()

    def _reconnect(self, run: RunRow, wanted: LegacyRegistration) -> None:
        quiet = runs.quiet_seconds(run, self._state.clock())
        with self._state.change():
            self._replace_config(run, wanted)
        run = self._state.runs.require_open()
        logger.info(
            "%s: its trainer registered again, %.0f s after it was last heard of; batch %d is next",
            named(run),
            quiet,
            run.committed_batch + 1,
        )
        self._state.events.add("trainer-returned", run_id=run.run_id, name=run.name)
        self._broker.sizes.warn()
        self._state.pacing_changed()

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
            trainer_seen_at=self._state.clock(),
        )

    def _sort_out_repeats(
        self, groups: list[CheckedGroup], owner: str, key: str | None
    ) -> tuple[list[CheckedGroup], list[CheckedGroup]]:
        """Return the groups that are new, and those accepted before."""
        if key is not None:
            return (groups, []) if self._broker.keys.find(owner, key) is None else ([], groups)
        return self._broker.submissions.repeats.split(groups)

    def _store(self, groups: Sequence[CheckedGroup], owner: str, key: str | None) -> list[GroupRow]:
        if not groups:
            return []
        broker = self._broker
        env_ids = [group.env_id for group in groups]
        known = list(map(broker.state.environments.find, env_ids))
        for row in filter(None, known):
            broker.touch(row)
        key_row = broker.keys.make(owner, key, len(groups)) if key is not None else None
        rows = broker.submissions.take(groups, env_ids, run_id=broker.pacer.run_for(known[0]), key=key_row)
        broker.state.counters.groups_unregistered_total += known.count(None)
        return rows

    def _owner(self, group: CheckedGroup) -> str:
        row = self._state.environments.find(group.env_id)
        return row.display_name if row is not None else f"environment {group.env_id}"

    def _count_buffered(self, rows: Sequence[GroupRow]) -> tuple[int, int]:
        """Count the groups that no batch can use yet, and the waiting sequences of the last one's environment."""
        waiting = [group for group in rows if not self._can_be_used(group)]
        if not waiting:
            return 0, 0
        lanes = self._state.queue.lanes_of(waiting[-1].env_id)
        return len(waiting), sum(lane.size * len(lane) for lane in lanes if not self._can_be_used(lane))

    def _can_be_used(self, group: GroupRow | QueueLane) -> bool:
        row = self._state.environments.find(group.env_id)
        return self._broker.sizes.can_be_used(group.size, row)


def _same_trainer(run: RunRow, wanted: LegacyRegistration) -> bool:
    names = (wanted.wandb_project, wanted.wandb_group, wanted.checkpoint_dir)
    return names == (run.wandb_project, run.wandb_group, run.checkpoint_dir)


def _make_run(wanted: LegacyRegistration, now: float) -> RunRow:
    request = RunRequest(
        name=wanted.wandb_group or NAMELESS,
        batch_size=wanted.batch_size,
        max_token_length=wanted.max_token_len,
        num_steps=wanted.num_steps,
        checkpoint_dir=wanted.checkpoint_dir,
        checkpoint_interval=wanted.save_checkpoint_interval,
        wandb_project=wanted.wandb_project,
        wandb_group=wanted.wandb_group,
    )
    run = runs.make_run(request, now, first_after=0)
    return msgspec.structs.replace(run, legacy=True, starting_step=wanted.starting_step, started=False)
