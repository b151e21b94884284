"""The `Broker` class: every operation on runs, environments, submissions and numbered batches.

HTTP routes, tests and the Atropos contract (`v0`) call it. Every method is synchronous and returns at once; a caller
that wants to wait registers a listener in `State.on_groups` or `State.on_pacing`. What a method promises is in the
store when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from atropos_api.broker.activity import Activity
from atropos_api.broker.batches import Batches, max_staleness_of, slice_for_rank
from atropos_api.broker.counters import Drops
from atropos_api.broker.environments import Environments
from atropos_api.broker.fleets import Fleets
from atropos_api.broker.inference_servers import InferenceServers
from atropos_api.broker.items import Items
from atropos_api.broker.pacing import GroupSizes, Pacer
from atropos_api.broker.policy_holds import PolicyHolds
from atropos_api.broker.queue import GroupQueue
from atropos_api.broker.recent_batches import RecentBatches
from atropos_api.broker.recovery import Repair, recover
from atropos_api.broker.reports import Reports, RunMetrics
from atropos_api.broker.rollouts import Rollouts
from atropos_api.broker.run_succession import RunSuccession
from atropos_api.broker.runs import Runs
from atropos_api.broker.state import BrokerSettings, Clock, EventLog, State, SteadyClock
from atropos_api.broker.submissions import IdempotencyKeys, Submissions
from atropos_api.errors import BrokerError, DamagedBatch, InvalidRequest, StoreDamaged
from atropos_api.store.backup import Backup
from atropos_api.store.base import LOST, BodyLog, EnvironmentRow, GroupRow, Ledger, RunRow, Snapshot
from atropos_api.store.failpoints import Failpoint, Reach, ignore_failpoint
from atropos_api.wire.group_json import CheckedGroup
from atropos_api.wire.messages import (
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    ItemLease,
    ItemRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    RunInfo,
    RunRequest,
    SubmitAnswer,
)
from atropos_api.wire.reports import EnvironmentActivity

LEAST_PROBE_BYTES: Final = 4096
MOST_PROBE_BYTES: Final = 64 * 2**20
"""Largest probe: a store with room for this much is not reported as full. A probe blocks all other calls."""


class SubmissionReceipt(NamedTuple):
    """An accepted submission: the answer to send, its new rows, and its groups without an idempotency key.

    `repeatable`: the groups that came without a key. `repeated`: those of them that were accepted before.
    """

    answer: SubmitAnswer
    rows: Sequence[GroupRow]
    repeatable: Sequence[CheckedGroup]
    repeated: Sequence[CheckedGroup]


class Broker:
    """One broker over one store. Not thread-safe: one thread (the event loop's) calls it."""

    def __init__(
        self,
        ledger: Ledger,
        bodies: BodyLog,
        *,
        settings: BrokerSettings | None = None,
        clock: Clock | None = None,
        monotonic: Clock = time.monotonic,
        reach: Reach = ignore_failpoint,
    ) -> None:
        self.settings = settings or BrokerSettings()
        clock = clock or SteadyClock()
        self.metrics = RunMetrics(ledger)
        self.recent = RecentBatches(self.settings.recent_bytes)
        snapshot = ledger.load()
        servers = InferenceServers(monotonic, lease_seconds=self.settings.server_lease, first_epoch=int(clock() * 1000))
        self._take_state(
            State(
                settings=self.settings,
                clock=clock,
                ledger=ledger,
                bodies=bodies,
                runs=Runs(ledger, snapshot.runs, snapshot.policies),
                environments=Environments(ledger, snapshot.environments),
                servers=servers,
                fleets=Fleets(monotonic),
                events=EventLog(ledger, clock, snapshot.events),
                drops=Drops(clock),
                revision=int(clock() * 1000),
                next_seq=snapshot.next_seq,
                reach=reach,
                activity=Activity(process_began_at=clock()),
            ),
            snapshot,
        )
        self.state.environments.presume_alive(clock())
        self.state.runs.presume_trainer_at_work(clock())
        if (run := self.state.runs.open) is not None:
            servers.prove(run.policy, run.policy_servers)
        servers.on_change.append(self.state.note_server)
        self.state.fleets.on_change.append(self.state.note_fleet)

    def rebuild(self) -> None:
        """Read all state from the store again, after the store refused a change that memory had partly made."""
        old = self.state
        snapshot = old.ledger.load()
        environments = Environments(old.ledger, snapshot.environments)
        environments.take_liveness(old.environments)
        fresh = replace(
            old,
            runs=Runs(old.ledger, snapshot.runs, snapshot.policies),
            environments=environments,
            queue=GroupQueue(),
            batches={},
            replayable={},
            left_over={},
            possibly_delivered=set(),
            next_seq=snapshot.next_seq,
            store_inconsistent=True,
        )
        self._take_state(fresh, snapshot)
        fresh.runs.presume_trainer_at_work(fresh.clock())
        fresh.store_inconsistent = False
        fresh.pacing_changed()

    def _take_state(self, state: State, snapshot: Snapshot) -> None:
        self.state = state
        self.keys = IdempotencyKeys(state, snapshot.keys)
        self.submissions = Submissions(state, self.keys)
        self.batches = Batches(state, self.keys.finish)
        self.repair = Repair(state, self.batches)
        self.sizes = GroupSizes(state)
        self.succession = RunSuccession(state, self.batches, self.sizes)
        self.holds = PolicyHolds(state)
        self.holds.bound_leases()
        self.items = Items(state)
        self.reports = Reports(state, self.metrics, self.recent)
        self.rollouts = Rollouts(state, self.recent)
        self.pacer = Pacer(state, self.batches, self.holds, self.sizes)
        recover(state, self.keys, self.submissions, self.batches, snapshot)

    # Runs

    def begin_run(self, request: RunRequest) -> RunInfo:
        """Begin a run, or resume the one of that name where the trainer's checkpoint left it."""
        run = self.succession.begin(request)
        if request.resume:
            self.metrics.drop_after(run.run_id, run.committed_batch)
        return self.run_info(run)

    def finish_run(self, run_id: str, *, epoch: int | None = None) -> None:
        """End a run: its environments are asked to stop. Ending it twice is harmless.

        A trainer passes its epoch, so that it cannot end a run that its successor has taken over; an operator may omit
        it.
        """
        self.succession.finish(self.state.runs.find(run_id, epoch))

    def trainer_called(self, run_id: str | None = None, epoch: int | None = None) -> RunRow:
        """Return the open run and note its trainer's call; `run_id` and `epoch`, where given, must match the run."""
        run = self.state.runs.require_open(run_id, epoch)
        self.state.runs.note_trainer(run, self.state.clock(), identified=run_id is not None)
        return run

    def run_info(self, run: RunRow) -> RunInfo:
        others = (groups for run_id, groups in self.state.left_over.items() if run_id != run.run_id)
        return RunInfo(
            run_id=run.run_id,
            epoch=run.epoch,
            next_batch=run.committed_batch + 1,
            highest_policy_version=self.state.runs.highest_version(),
            committed_batch=run.committed_batch,
            leftover_groups=sum(len(groups) for groups in others),
            policy=run.policy,
            max_staleness=max_staleness_of(self.state, run),
        )

    def update_policy(self, update: PolicyUpdate) -> PolicyState:
        """Record a successful publish. Repeating it is harmless; an older version is refused.

        A publish made although an evaluation holds the policy is accepted and counted, because it has already happened.
        """
        run = self.trainer_called(update.run_id, update.epoch)
        with self.state.change():
            changed = self.state.runs.record_policy(run, update, self.state.clock())
            self.state.record_servers(update)
        self.state.activity.published_run = run.run_id
        if changed:
            if self.holds.seconds(run) and update.version != run.policy_version:
                self.state.counters.publishes_while_held_total += 1
            self.state.events.add("policy", run_id=run.run_id, version=update.version, step=update.step)
            self.batches.expire(self.state.runs.require_open(), run.formed_batch + 1)
            self.state.pacing_changed()
        return self.policy_state()

    def policy_state(self, run_id: str | None = None, epoch: int | None = None) -> PolicyState:
        """Return the published policy, and for how many seconds evaluations ask to leave it unchanged."""
        run = self.trainer_called(run_id, epoch) if run_id is not None else self.state.runs.require_open()
        held_seconds = self.holds.seconds(run)
        if run_id is not None:
            # Only a trainer names its run here, and it asks before it publishes.
            self.state.activity.note_hold(self.state.clock(), held=held_seconds > 0)
        return PolicyState(
            run_id=run.run_id, version=run.policy_version, step=run.policy_step, held_seconds=held_seconds
        )

    def backup(self) -> Backup:
        """Return a backup of the store as it is now; the caller closes it."""
        return Backup(self.state.ledger.dump(), self.state.bodies.open_all())

    def log_fields(self) -> dict[str, str | int | None]:
        """Return the open run's name, id, step and policy version, for log records."""
        run = self.state.runs.open
        if run is None:
            return {}
        return {
            "run": run.name,
            "run_id": run.run_id,
            "step": self.trained_steps(run),
            "policy_version": run.policy_version,
        }

    # Batches

    def get_batch(
        self, number: int, *, run_id: str | None = None, epoch: int | None = None, rank: int = 0, world_size: int = 1
    ) -> list[GroupRow] | None:
        """Return the groups of batch `number` for one rank, or None while the queue cannot fill it."""
        if not 0 <= rank < world_size:
            raise InvalidRequest(f"rank {rank} is not below the world size {world_size}", field="rank", value=rank)
        run = self.trainer_called(run_id, epoch)
        groups = self.batches.obtain(run, number)
        if groups is None:
            self.state.activity.batch_wait.note(self.state.clock(), number)
            return None
        if number > run.handed_batch:
            self.state.runs.change(self.state.runs.require_open(), handed_batch=number)
            self.state.counters.batches_handed_total += 1
        mine = groups if world_size == 1 else slice_for_rank(groups, rank, world_size)
        return [group for group in mine if group.body != LOST]

    def commit(self, number: int, *, run_id: str | None = None, epoch: int | None = None) -> None:
        run = self.trainer_called(run_id, epoch)
        self.batches.commit(run, number)
        self.repair.compact()

    def read_bodies(self, groups: Sequence[GroupRow]) -> list[bytes]:
        """Return the bodies of a batch's groups. Damaged groups are dropped; the error raised asks for a retry."""
        try:
            bodies = self.state.bodies.read([group.body for group in groups])
        except StoreDamaged as error:
            self.repair.lose(error)
            raise DamagedBatch(f"{error}; these groups are dropped, repeat the request for the others") from error
        self.state.possibly_delivered.update(group.batch for group in groups)
        self.recent.add(self.state.batches, groups, bodies, self.state.clock())
        self.state.reach(Failpoint.BATCH_READ)
        return bodies

    def probe_store(self, size_bytes: int = 0) -> None:
        """Write a probe that changes nothing; raise if the store takes no writes, or none of this size."""
        size = min(max(size_bytes, LEAST_PROBE_BYTES), MOST_PROBE_BYTES)
        self.state.bodies.discard(self.state.bodies.append([bytes(size)]))
        self.state.ledger.probe()
        self.sync()

    def sync(self) -> None:
        """Force all acknowledged data to the disk; may be called from another thread."""
        self.state.bodies.sync()
        self.state.ledger.sync()

    def close(self) -> None:
        """Close the store. All acknowledged data is in it already."""
        self.submissions.close()
        # The ledger is first: with `--fsync interval` it forces the last second to the disk, and the bodies with it.
        self.state.ledger.close()
        self.state.bodies.close()

    # Environments

    def register_environment(self, request: EnvironmentRequest) -> EnvironmentInfo:
        self.sizes.refuse_too_large(request.group_size)
        row = self.state.environments.register(request, self.state.clock())
        self.touch(row)
        self.sizes.warn()
        self.state.events.add("environment-registered", environment_id=row.environment_id, name=row.name)
        self.state.pacing_changed()
        return self.pacer.environment_info(row)

    def disconnect_environment(self, environment_id: int) -> None:
        self.state.environments.disconnect(environment_id)
        self.sizes.warn()
        self.state.events.add("environment-left", environment_id=environment_id)
        self.state.pacing_changed()

    def heartbeat(self, environment_id: int, process: str = "") -> Pacing:
        """Record that an environment is alive, and return its pacing; `process` is the one that it registered with."""
        row = self.state.environments.get(environment_id)
        self.state.environments.refuse_other_process(row, process)
        self.touch(row)
        return self.pacing(row)

    def report_dropped(self, environment_id: int, report: DropReport) -> None:
        """Record how many groups an environment has dropped so far, and why."""
        row = self.state.environments.get(environment_id)
        self.touch(row)
        if added := self.state.drops.take_report(environment_id, report):
            self.state.events.add("groups-dropped", name=row.display_name, groups=added, reason=report.explanation)

    def lease_items(self, environment_id: int, request: ItemRequest) -> ItemLease:
        """Record what happened to an environment's items, and lease others to it."""
        row = self.state.environments.get(environment_id)
        self.touch(row)
        return self.items.lease(row, request)

    def report_activity(self, environment_id: int, report: EnvironmentActivity) -> None:
        """Record what an environment says about its own state."""
        self.touch(self.state.environments.get(environment_id))
        self.reports.take_environment(environment_id, report)

    def touch(self, row: EnvironmentRow) -> None:
        """Record a sign of life of an environment (any request is one), and make it part of the open run."""
        run = self.state.runs.open
        self.state.environments.touch(row, self.state.clock(), run.run_id if run else None)

    def pacing(self, row: EnvironmentRow) -> Pacing:
        return self.pacer.pacing(row)

    def trained_steps(self, run: RunRow) -> int:
        return self.pacer.trained_steps(run)

    def outstanding_sequences(self, run: RunRow) -> int:
        return self.pacer.outstanding_sequences(run)

    # Submissions

    def submit(
        self,
        environment_id: int,
        groups: Sequence[CheckedGroup],
        *,
        key: str | None = None,
        run_id: str | None = None,
    ) -> SubmitAnswer:
        """Accept groups from a sender that is sure to receive the answer."""
        submitted = self.take(environment_id, groups, key=key, run_id=run_id)
        self.settle(submitted)
        return submitted.answer

    def take(
        self,
        environment_id: int,
        groups: Sequence[CheckedGroup],
        *,
        key: str | None = None,
        run_id: str | None = None,
    ) -> SubmissionReceipt:
        """Accept groups of a registered environment. A key that was used before changes nothing.

        Groups that are meant for another run than the open one are left over of that run. The caller then reports to
        `settle` whether the answer arrived.
        """
        row = self.state.environments.get(environment_id)
        self.touch(row)
        own_run = None if run_id is None else self.state.runs.find(run_id).run_id
        if key is not None and self.keys.is_repeat(row.name, key):
            return self._submitted(row, [], duplicates=len(groups))
        fresh, repeated = (list(groups), []) if key is not None else self.submissions.repeats.split(groups)
        had_room = self.pacer.has_room()
        key_row = self.keys.make(row.name, key, len(groups)) if key is not None and groups else None
        taken: list[GroupRow] = []
        if fresh:
            try:
                taken = self.submissions.take(
                    fresh, [environment_id] * len(fresh), run_id=own_run or self.pacer.run_for(row), key=key_row
                )
            except BrokerError:
                self.submissions.settle([], repeated, lost=repeated)
                raise
        if had_room and not self.pacer.has_room():
            self.state.pacing_changed()
        self.batches.count_unpackable(taken)
        repeatable = () if key is not None else groups
        return self._submitted(row, taken, duplicates=len(repeated), repeatable=repeatable, repeated=repeated)

    def settle(self, submitted: SubmissionReceipt, *, arrived: bool = True) -> None:
        """Record that the answer was sent or, unless it `arrived`, that the same bytes may come again as a repeat."""
        self.submissions.settle(submitted.rows, submitted.repeated, lost=() if arrived else submitted.repeatable)

    def _submitted(
        self,
        row: EnvironmentRow,
        taken: list[GroupRow],
        *,
        duplicates: int,
        repeatable: Sequence[CheckedGroup] = (),
        repeated: Sequence[CheckedGroup] = (),
    ) -> SubmissionReceipt:
        self.state.counters.groups_duplicate_total += duplicates
        waiting = sum(not self.sizes.can_be_used(group.size, row) for group in taken)
        answer = SubmitAnswer(accepted=len(taken), buffered=waiting, duplicates=duplicates, pacing=self.pacing(row))
        return SubmissionReceipt(answer, taken, repeatable, repeated)
