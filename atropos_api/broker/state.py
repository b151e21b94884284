"""The state that the parts of the broker share.

`State` holds the store, the rows in memory, the counters, and the listeners for changes. `EventLog` is a ring buffer of
the latest numbered events, so that a watcher that fell behind can catch up. `BrokerSettings` holds the operator's
options that the broker's rules follow.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.broker.activity import Activity
from atropos_api.broker.counters import Counters, Drops
from atropos_api.broker.environments import Environments, LivenessSnapshot
from atropos_api.broker.fleets import Fleets
from atropos_api.broker.inference_servers import InferenceServers
from atropos_api.broker.queue import GroupQueue
from atropos_api.broker.runs import Runs
from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import KEPT_EVENTS, BodyLog, BodyRef, EnvironmentRow, Event, GroupRow, Ledger
from atropos_api.store.failpoints import Reach, ignore_failpoint
from atropos_api.wire.fleets import Fleet
from atropos_api.wire.group_json import CheckedGroup
from atropos_api.wire.groups import Form
from atropos_api.wire.messages import PolicyUpdate
from atropos_api.wire.servers import InferenceServer

GAP: Final = 1000
"""Ids skipped at each start: a watcher may have seen some that had not reached the store."""


class EventLog:
    """The last `capacity` events. The ledger stores them too, so that ids and watchers continue after a restart.

    If the ledger holds no events, ids begin at the clock's milliseconds, above those of any earlier process.
    """

    def __init__(
        self, ledger: Ledger, clock: Callable[[], float], found: Iterable[Event] = (), capacity: int = KEPT_EVENTS
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._events: deque[Event] = deque(found, maxlen=capacity)
        self.last_id = self._events[-1].id + GAP if self._events else int(clock() * 1000)
        self.on_event: list[Callable[[], None]] = []

    def add(self, kind: str, **data: Any) -> None:
        self.last_id += 1
        event = Event(id=self.last_id, type=kind, time=self._clock(), data=data)
        self._events.append(event)
        # The event has happened, even if the disk has no room to record it.
        with suppress(StoreUnavailable):
            self._ledger.add_event(event)
        for listener in self.on_event:
            listener()

    def after(self, event_id: int) -> list[Event]:
        """Return the events after `event_id`, oldest first; all of them if `event_id` is above the last id."""
        if event_id > self.last_id:
            return list(self._events)
        missed = []
        for event in reversed(self._events):
            if event.id <= event_id:
                break
            missed.append(event)
        return missed[::-1]

    def has(self, kind: str, **data: Any) -> bool:
        """Return True if an event of this kind with these data is still known."""
        known = (event for event in self._events if event.type == kind)
        return any(data.items() <= event.data.items() for event in known)

    def has_forgotten(self, event_id: int) -> bool:
        """Return True if events after `event_id` were discarded, or if the id is not one of this log's."""
        first = self._events[0].id if self._events else self.last_id + 1
        return not first - 1 <= event_id <= self.last_id


Clock = Callable[[], float]


class SteadyClock:
    """A clock that shows the time of day at the start plus the monotonic time since then.

    Liveness, leases and waits are differences of its times: a step of the machine's clock, as by NTP, must not end or
    stretch them.
    """

    def __init__(self, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_seconds = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset_seconds + self._monotonic()


Listener = Callable[[], None]


@dataclass(slots=True)
class State:
    """All state of one broker in memory. `batches` holds the formed, uncommitted batches of the open run by number."""

    settings: BrokerSettings
    clock: Clock
    ledger: Ledger
    bodies: BodyLog
    runs: Runs
    environments: Environments
    servers: InferenceServers
    fleets: Fleets
    events: EventLog
    drops: Drops
    revision: int
    next_seq: int
    queue: GroupQueue = field(default_factory=GroupQueue)
    batches: dict[int, list[GroupRow]] = field(default_factory=dict)
    replayable: dict[int, list[GroupRow]] = field(default_factory=dict)
    """Committed batches by number whose groups are kept for a resumed run."""
    left_over: dict[str, list[GroupRow]] = field(default_factory=dict)
    possibly_delivered: set[int] = field(default_factory=set)
    """Numbers of uncommitted batches of which a caller may have received bytes."""
    reach: Reach = ignore_failpoint
    counters: Counters = field(default_factory=Counters)
    activity: Activity = field(default_factory=Activity)
    latest_body: bytes | None = None
    latest_form: Form = "json"
    on_groups: list[Listener] = field(default_factory=list)
    on_pacing: list[Listener] = field(default_factory=list)
    on_queued: list[Callable[[Sequence[CheckedGroup], Sequence[GroupRow]], None]] = field(default_factory=list)
    on_formed: list[Callable[[str, int, Sequence[GroupRow]], None]] = field(default_factory=list)
    ended: bool = False
    """True for a copy of the store of a broker that has ended, as `atropos view` shows it: nothing is waited for."""
    store_inconsistent: bool = False
    """True if the store refused a change that memory had already made in part, until memory is read from it again."""

    _change_depth: int = 0
    _discarded: list[BodyRef] = field(default_factory=list)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change several rows in one transaction. If the store refuses, memory must be read from it again."""
        self._change_depth += 1
        try:
            with self.ledger.transaction():
                yield
        except StoreUnavailable:
            self.store_inconsistent = True
            raise
        finally:
            self._change_depth -= 1
            unneeded, self._discarded = self._discarded, []
        self.discard(unneeded)

    def discard(self, refs: Iterable[BodyRef]) -> None:
        """Release bodies that are not needed any more; inside a change, only once that change has succeeded."""
        if self._change_depth:
            self._discarded.extend(refs)
        else:
            self.bodies.discard(refs)

    def liveness(self) -> LivenessSnapshot:
        return self.environments.liveness(self.clock(), self.settings.environment_timeout)

    def alive_environments(self) -> list[EnvironmentRow]:
        return self.liveness().alive

    def registered_sizes(self) -> frozenset[int]:
        return self.liveness().connected_sizes

    def oldest_age_seconds(self) -> float | None:
        """Return the age of the queue's oldest group; 0 if the machine's clock has been set back since it came."""
        oldest = self.queue.oldest()
        return None if oldest is None else max(0.0, self.clock() - oldest.arrived_at)

    def is_under_pressure(self) -> bool:
        """Return True if more than nine tenths of a queue limit (sequences or bytes) are used."""
        queue, settings = self.queue, self.settings
        return (
            queue.sequences > 0.9 * settings.max_queued_sequences or queue.body_bytes > 0.9 * settings.max_queued_bytes
        )

    def pacing_changed(self) -> None:
        """Raise the revision: environments that wait on the old one get their answer now."""
        self.revision += 1
        for listener in self.on_pacing:
            listener()

    def groups_changed(self) -> None:
        """Notify the listeners that a batch can perhaps be formed now that could not be before."""
        for listener in self.on_groups:
            listener()

    def record_servers(self, update: PolicyUpdate) -> None:
        """Record which registered servers serve the policy, so that a restarted broker lets them go on serving."""
        run = self.runs.require_open()
        if update.servers is None or update.version != run.policy_version:
            return
        proven = tuple(sorted(update.servers))
        if proven != run.policy_servers:
            run = self.runs.change(run, policy_servers=proven)
        self.servers.prove(run.policy, proven)

    def note_server(self, server: InferenceServer) -> None:
        """Record the change of a server's state as an event."""
        self.events.add(
            "server-changed",
            server_id=server.server_id,
            policy=server.policy,
            state=server.state,
            url=server.url,
            reason=server.reason,
        )

    def note_fleet(self, fleet: Fleet) -> None:
        """Record as an event that another number of a launcher's servers is wanted, or that the launcher follows it."""
        self.events.add(
            "fleet-changed",
            fleet_id=fleet.fleet_id,
            wanted=fleet.wanted,
            running=fleet.running,
            followed=fleet.followed,
            note=fleet.note,
        )


class BrokerSettings(BaseModel):
    """The operator's options that the broker's rules follow: limits and durations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_memory_seconds: ClassVar[float] = 3600.0
    """Time for which an idempotency key is remembered after its groups are done."""
    max_left_over_bytes: ClassVar[int] = 2**30
    """Bytes of groups that are kept for runs that have ended, besides the newest."""

    max_staleness: int | None = Field(
        None, ge=0, description="Expire groups whose policy is more than this many trainer steps old."
    )
    drop_orphaned: bool = Field(False, description="Drop queued groups of policies that a resumed run discarded.")
    require_versions: bool = Field(False, description="Refuse groups without policy versions.")
    dedup_window: float = Field(
        30.0, ge=0, description="Seconds in which a repeated submission without a key is recognised; 0 turns it off."
    )
    max_uncommitted: int = Field(
        16,
        ge=1,
        description="Batches that may be formed and not yet committed; at least two more than the run's checkpoint "
        "interval.",
    )
    keep_batches: int = Field(0, ge=0, description="Committed batches whose groups are kept for replay.")
    environment_timeout: float = Field(
        60.0, gt=0, description="Seconds without a call after which an environment's weight and minimum are ignored."
    )
    server_lease: float = Field(
        10.0, ge=0.5, le=600, description="Seconds without a renewal after which a registered inference server is gone."
    )
    min_allocation_wait: float = Field(
        120.0, ge=0, description="Seconds a batch waits for an environment's minimum before it is formed without it."
    )
    max_queued_sequences: int = Field(200_000, ge=1, description="Sequences that may be queued; more are answered 503.")
    max_queued_bytes: int = Field(
        16 * 2**30, ge=1, description="Bytes of groups that may be queued; more are answered 503."
    )
    recent_bytes: int = Field(
        64 * 2**20,
        ge=0,
        description="Bytes of the newest groups handed out that are kept in memory, for the page to show.",
    )
