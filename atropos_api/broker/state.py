"""What the parts of the broker share: the store, the rows in memory, counters, and who wants to hear of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from atropos_api.broker.census import Census
from atropos_api.broker.counters import Counters
from atropos_api.broker.drops import Drops
from atropos_api.broker.environments import Environments
from atropos_api.broker.events import EventLog
from atropos_api.broker.queue import GroupQueue
from atropos_api.broker.runs import Runs
from atropos_api.broker.settings import BrokerSettings
from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import BodyLog, BodyRef, EnvironmentRow, GroupRow, Ledger
from atropos_api.store.steps import Reach, pass_by
from atropos_api.wire.groups import Form

Clock = Callable[[], float]
Listener = Callable[[], None]


@dataclass(slots=True)
class State:
    """One broker's memory. `batches` holds the formed, uncommitted batches of the open run by number."""

    settings: BrokerSettings
    clock: Clock
    ledger: Ledger
    bodies: BodyLog
    runs: Runs
    environments: Environments
    events: EventLog
    drops: Drops
    revision: int
    next_seq: int
    queue: GroupQueue = field(default_factory=GroupQueue)
    batches: dict[int, list[GroupRow]] = field(default_factory=dict)
    kept: dict[int, list[GroupRow]] = field(default_factory=dict)
    left_over: dict[str, list[GroupRow]] = field(default_factory=dict)
    shown: set[int] = field(default_factory=set)
    """Uncommitted batches of which somebody may have seen bytes."""
    reach: Reach = pass_by
    counters: Counters = field(default_factory=Counters)
    latest_body: bytes | None = None
    latest_form: Form = "json"
    on_groups: list[Listener] = field(default_factory=list)
    on_pacing: list[Listener] = field(default_factory=list)
    torn: bool = False
    """The store refused a change that memory has already made a part of."""

    _change_depth: int = 0
    _discarded: list[BodyRef] = field(default_factory=list)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Several rows change together. If the store refuses, memory has to be read from it again (`torn`)."""
        self._change_depth += 1
        try:
            with self.ledger.transaction():
                yield
        except StoreUnavailable:
            self.torn = True
            raise
        finally:
            self._change_depth -= 1
            unneeded, self._discarded = self._discarded, []
        self.discard(unneeded)

    def discard(self, refs: Iterable[BodyRef]) -> None:
        """Nobody will ask for these bodies again; inside a change that holds once the rows are gone for good."""
        if self._change_depth:
            self._discarded.extend(refs)
        else:
            self.bodies.discard(refs)

    def census(self) -> Census:
        return self.environments.census(self.clock(), self.settings.environment_timeout_seconds)

    def alive_environments(self) -> list[EnvironmentRow]:
        return self.census().alive

    def registered_sizes(self) -> frozenset[int]:
        return self.census().connected_sizes

    def pacing_changed(self) -> None:
        """A new revision: environments that wait on the old one get their answer now."""
        self.revision += 1
        for listener in self.on_pacing:
            listener()

    def groups_changed(self) -> None:
        """Perhaps a batch can be formed now that could not be before."""
        for listener in self.on_groups:
            listener()
