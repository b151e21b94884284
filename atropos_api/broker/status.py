"""The broker's status, made from counts alone.

`describe_status` returns one `Status` for the page, `atropos top` and the progress view. `AtroposStatus` computes
`/status-env`, the numbers by which environments of the Atropos contract pace themselves: they know only sequences,
react to nothing but a queue that looks long, and stop once the step is above the total.
"""

from __future__ import annotations

import msgspec

from atropos_api.broker.batches import max_staleness_of
from atropos_api.broker.broker import Broker
from atropos_api.broker.counters import Counters, LatestDrop
from atropos_api.broker.environments import LivenessSnapshot, token_share_of
from atropos_api.broker.flow import (
    FlowStatus,
    ServerStatus,
    TrainerStatus,
    activity_of,
    describe_flow,
    describe_servers,
    describe_trainers,
)
from atropos_api.broker.packing import batch_in_sequences, part_of_batch, queued_by_environment
from atropos_api.broker.state import State
from atropos_api.store.base import EnvironmentRow, ItemsRow, RunRow
from atropos_api.wire.fleets import Fleet
from atropos_api.wire.reports import EnvironmentActivity


class HeldPolicy(msgspec.Struct, kw_only=True):
    seconds: float
    version: int | None
    reason: str
    held_seconds: float
    """Time since it was granted."""


class RunStatus(RunRow, kw_only=True):
    """The open run, or else the one that finished last."""

    holds: tuple[HeldPolicy, ...]  # type: ignore[assignment] # without the ids, which suffice to end a hold
    current_step: int
    next_batch: int
    metrics_step: int | None
    """The last step whose metrics were reported since this broker began; it shows that there is more to read."""
    last_step_seconds: float | None
    """Time since the report of a step came last; None: none has come since this broker began."""


class QueueStatus(msgspec.Struct, kw_only=True):
    groups: int
    sequences: int
    bytes: int
    oldest_age_seconds: float | None
    unpackable_sizes: list[int]
    unpackable_groups: int


class BatchesStatus(msgspec.Struct, kw_only=True):
    uncommitted: dict[str, int]
    """Sequences by batch number."""
    outstanding_sequences: int


class ItemsStatus(msgspec.Struct, kw_only=True):
    drawn: int
    """Items leased so far, each counted once."""
    in_progress: int
    finished: int
    dropped: dict[str, int]
    """Items without a group, by reason."""
    sampled_sequences: int
    """Rollouts scored, those of dropped groups included."""
    sampled_tokens: int


class EnvironmentStatus(msgspec.Struct, kw_only=True):
    environment_id: int
    name: str
    group_size: int
    weight: float
    connected: bool
    quiet_seconds: float
    queued_sequences: int
    dropped_groups: dict[str, int]
    latest_drop: LatestDrop | None
    items: ItemsStatus | None
    """Items of its data in the run, if it leases them."""
    outcomes: dict[str, int]
    """Its groups in the run that are trained, or that the broker dropped, by outcome."""
    activity: EnvironmentActivity | None
    """Its report about itself, as of now; None if it sends none."""


class StoreStatus(msgspec.Struct, kw_only=True):
    bytes: int


class Status(msgspec.Struct, kw_only=True):
    """The whole status of a broker: run, policy, queue, environments, counters."""

    time: float
    run: RunStatus | None
    queue: QueueStatus
    batches: BatchesStatus
    environments: list[EnvironmentStatus]
    left_over_groups: dict[str, int]
    store: StoreStatus
    dropped_groups: dict[str, int]
    counters: Counters
    flow: FlowStatus
    trainers: list[TrainerStatus]
    fleets: list[Fleet]
    """The inference servers of each launcher: how many are wanted, and how many there are."""
    servers: list[ServerStatus]
    """Registered inference servers, those with the most waiting requests first."""


def describe_status(broker: Broker, *, store_failure: str | None = None) -> Status:
    state = broker.state
    run = state.runs.open or state.runs.last_finished
    return Status(
        time=state.clock(),
        run=_describe_run(broker, run) if run is not None else None,
        queue=_describe_queue(broker),
        batches=BatchesStatus(
            uncommitted={str(n): sum(group.size for group in groups) for n, groups in state.batches.items()},
            outstanding_sequences=broker.outstanding_sequences(run) if run is not None else state.queue.sequences,
        ),
        environments=[_describe_environment(broker, row) for row in state.environments],
        left_over_groups={run_id: len(groups) for run_id, groups in state.left_over.items()},
        store=StoreStatus(bytes=state.bodies.size_bytes()),
        dropped_groups=state.drops.totals(),
        counters=state.counters,
        flow=describe_flow(broker, store_failure=store_failure),
        trainers=describe_trainers(broker),
        fleets=state.fleets.select().fleets,
        servers=describe_servers(broker),
    )


def _describe_run(broker: Broker, run: RunRow) -> RunStatus:
    now = broker.state.clock()
    holds = [
        HeldPolicy(
            seconds=row.until - now, version=row.version, reason=row.reason, held_seconds=max(0.0, now - row.since)
        )
        for row in broker.holds.alive(run)
    ]
    described = msgspec.structs.asdict(run) | {"holds": tuple(holds)}
    return RunStatus(
        **described,
        current_step=broker.trained_steps(run),
        next_batch=run.formed_batch + 1,
        metrics_step=broker.metrics.last_step(run.run_id),
        last_step_seconds=broker.state.activity.seconds_since_step(run.run_id, now),
    )


def _describe_queue(broker: Broker) -> QueueStatus:
    state, queue = broker.state, broker.state.queue
    unpackable = broker.batches.unpackable_sizes(state.runs.open) if state.runs.open is not None else []
    return QueueStatus(
        groups=queue.groups,
        sequences=queue.sequences,
        bytes=queue.body_bytes,
        oldest_age_seconds=state.oldest_age_seconds(),
        unpackable_sizes=unpackable,
        unpackable_groups=sum(queue.groups_by_size[size] for size in unpackable),
    )


def _describe_environment(broker: Broker, row: EnvironmentRow) -> EnvironmentStatus:
    state = broker.state
    run = state.runs.open or state.runs.last_finished
    run_id = row.run_id if run is None else run.run_id
    items = row.items_in(run_id)
    quiet = state.clock() - row.seen_at
    return EnvironmentStatus(
        environment_id=row.environment_id,
        name=row.display_name,
        group_size=row.group_size,
        weight=row.weight,
        connected=row.connected and quiet <= state.settings.environment_timeout,
        quiet_seconds=quiet,
        queued_sequences=state.queue.sequences_by_env.get(row.environment_id, 0),
        dropped_groups=state.drops.of(row.environment_id),
        latest_drop=state.drops.latest_of(row.environment_id),
        items=_describe_items(items) if items is not None else None,
        outcomes=row.outcomes_in(run_id),
        activity=activity_of(broker, row.environment_id),
    )


def _describe_items(items: ItemsRow) -> ItemsStatus:
    return ItemsStatus(
        drawn=items.next_item,
        in_progress=len(items.leased) + len(items.returned),
        finished=items.finished,
        dropped=items.dropped,
        sampled_sequences=items.sampled_sequences,
        sampled_tokens=items.sampled_tokens,
    )


ASSUMED_MAX_BATCHES_OFFPOLICY = 3
"""Default of legacy environments, which do not report their own setting."""

LEAST_WEIGHT = 0.01


class StatusEnv(msgspec.Struct, kw_only=True):
    """Answer of `GET /status-env`; sizes are in groups of the environment that asks."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class AtroposStatus:
    """The answers of `/status-env`: queue length, step and weight, as one environment should see them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _state(self) -> State:
        return self._broker.state

    def status_env(self, environment_id: int) -> StatusEnv:
        row = self._state.environments.get(environment_id)
        self._broker.touch(row)
        run = self._state.runs.open
        liveness = self._state.liveness()
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
            queue_size=self._queue_size(row, own, others, run),
            unallocated_fraction=1.0 - min(1.0, liveness.allocated),
            self_queue_size=own // group_size,
            max_group_size=largest,
            env_weight=_weight_of(row, liveness),
        )

    def batch_sequences(self, run: RunRow) -> int:
        """Return the batch size in sequences, the only unit that callers of this contract know."""
        return batch_in_sequences(run, self._usual_size())

    def _queued_by_environment(self, run: RunRow | None) -> dict[int | None, int]:
        """Return the queued sequences by environment.

        Under a v1 run the untrained batches count too: otherwise prefetching would make the queue look too short.
        """
        if run is None:
            return dict(self._state.queue.sequences_by_env)
        one = batch_in_sequences(run, self._usual_size()) // run.batch_size
        if run.unit == "sequences":
            queued = dict(self._state.queue.sequences_by_env)
        else:
            counts = queued_by_environment(run, self._state.queue.lanes)
            queued = {owner: one * count for owner, count in counts.items()}
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
        """Return the group size by which a run that counts groups is reported in sequences."""
        return self._state.liveness().largest_size

    def _share_of_other(self, env_id: int | None, sequences: int, largest: int, run: RunRow | None) -> int:
        """Return another environment's queue, in whole packs, less the part that its own minimum will take."""
        packed = -(-sequences // largest) * largest
        row = self._state.environments.find(env_id)
        if row is None or run is None or not row.min_batch_allocation:
            return packed
        return max(0, packed - part_of_batch(self.batch_sequences(run), row.min_batch_allocation))

    def _queue_size(self, row: EnvironmentRow, own: int, others: int, run: RunRow | None) -> int:
        group_size = max(row.group_size, self._state.queue.largest_size_of(row.environment_id))
        if run is not None and self._broker.sizes.reason_to_pause(run, row) is not None:
            return self._with_pressure(own // group_size, group_size, run, pause=True)
        if run is not None and self._broker.batches.is_short_of(run, row):
            # Without this environment's groups the rest of the queue is useless, so it must not pause for them.
            others = 0
        return self._with_pressure((own + others) // group_size, group_size, run)

    def _with_pressure(self, queue_size: int, group_size: int, run: RunRow | None, *, pause: bool = False) -> int:
        """Return the queue size to report: it grows before the queue is full or the groups are too old.

        Legacy environments react to no other number. It stays below the size at which they would take the run to be
        over.
        """
        if run is None:
            return queue_size
        reported = queue_size
        batch_sequences = self.batch_sequences(run)
        budget = max_staleness_of(self._state, run)
        if budget is not None and budget + 1 < ASSUMED_MAX_BATCHES_OFFPOLICY:
            reported = -(-queue_size * ASSUMED_MAX_BATCHES_OFFPOLICY // (budget + 1))
        if pause or self._broker.state.is_under_pressure():
            reported = max(reported, ASSUMED_MAX_BATCHES_OFFPOLICY * 10 * batch_sequences // group_size)
        steps_left = run.num_steps - self._broker.trained_steps(run)
        believable = max(queue_size, ((steps_left + 1) * batch_sequences - 1) // group_size)
        return min(reported, believable) if run.num_steps > 0 else reported

    def _current_step(self, row: EnvironmentRow, run: RunRow | None) -> int:
        if run is not None:
            return self._broker.trained_steps(run)
        if row.run_id is None or not self._state.runs.has_finished(row.run_id):
            return 0
        # A step above the total makes a legacy environment stop.
        return self._state.runs.find(row.run_id).num_steps + 1


def _weight_of(row: EnvironmentRow, liveness: LivenessSnapshot) -> float:
    """Return the environment's share of tokens by weight; an equal share if no environment has a weight."""
    if liveness.token_share <= 0:
        return 1.0 / max(1, len(liveness.alive))
    own = token_share_of(row) if row.environment_id in liveness.alive_ids else 0.0
    return max(LEAST_WEIGHT, own / liveness.token_share)
