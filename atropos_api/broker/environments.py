"""The registered environments: stable names, ids that are never reused, and liveness.

The liveness snapshot (the environments that are alive, and sums over them) is computed when an environment registers,
disconnects, times out or calls again, not at every request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from atropos_api.errors import UnknownEnvironment
from atropos_api.store.base import NO_RUN, EnvironmentRow, GroupRow, ItemsRow, Ledger, OutcomesRow
from atropos_api.wire.messages import EnvironmentRequest

LEGACY_QUIET_SECONDS = 10.0
"""Silence after which a legacy environment has gone: it polls ten times a second, or every 5 s before it runs."""


MOST_FORMER_RUNS = 8
"""Earlier runs of which an environment's items and outcomes are kept."""

OfRunT = TypeVar("OfRunT", ItemsRow, OutcomesRow)


class Environments:
    """The registered environments; each change is recorded in the ledger before it takes effect."""

    def __init__(self, ledger: Ledger, rows: Iterable[EnvironmentRow]) -> None:
        self._ledger = ledger
        self._rows = {row.environment_id: row for row in rows}
        self._by_name = {row.name: row for row in self._rows.values() if not row.legacy}
        self._liveness: LivenessSnapshot | None = None
        self._waiting: Counter[str] = Counter()
        """Open heartbeats by process. The connection of a killed process is closed, so its heartbeat ends."""

    def __iter__(self) -> Iterator[EnvironmentRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, environment_id: int) -> EnvironmentRow:
        row = self._rows.get(environment_id)
        if row is None:
            known = ", ".join(map(str, list(self._rows)[:10])) or "none"
            raise UnknownEnvironment(
                f"no environment has the id {environment_id} (registered: {known}); register it first",
                field="environment_id",
                value=environment_id,
            )
        return row

    def find(self, environment_id: int | None) -> EnvironmentRow | None:
        return None if environment_id is None else self._rows.get(environment_id)

    def register(self, request: EnvironmentRequest, now: float) -> EnvironmentRow:
        """Register by stable name: the same name gets the same id, also after a restart.

        Of two processes of one name that run at the same time, the second gets a name with a number: the two do not
        share data or pacing.
        """
        name = self._free_name(request)
        row = self._enter(request, now, self._by_name.get(name), name=name, display_name=name)
        self._by_name[row.name] = row
        return row

    @contextmanager
    def waiting(self, process: str) -> Iterator[None]:
        """Count a heartbeat of a process that waits inside the block: the process is alive meanwhile."""
        self._waiting[process] += 1
        try:
            yield
        finally:
            self._waiting.subtract([process])
            self._waiting += Counter()  # adding a Counter drops the names whose count is 0

    def refuse_other_process(self, row: EnvironmentRow, process: str) -> None:
        """Raise `UnknownEnvironment` if another process has this environment by now: the caller registers again."""
        row.process = row.process or process
        if process and row.process != process:
            raise UnknownEnvironment(
                f"environment {row.environment_id} ({row.name}) is another process's; register again",
                field="environment_id",
                value=row.environment_id,
            )

    def _free_name(self, request: EnvironmentRequest) -> str:
        """Return the process's earlier name, or the first of NAME, NAME_1, … that no other living process has."""
        if not request.process:
            return request.name
        names = [request.name, *(f"{request.name}_{number}" for number in range(1, len(self._by_name) + 1))]
        owners = {name: self._process_of(name) for name in names}
        own = [name for name in names if owners[name] == request.process]
        free = [name for name in names if (owner := owners[name]) is None or not self._waiting[owner]]
        return next(iter([*own, *free]))

    def _process_of(self, name: str) -> str | None:
        row = self._by_name.get(name)
        return None if row is None else row.process or None

    def register_legacy(self, request: EnvironmentRequest, now: float) -> EnvironmentRow:
        """Register as Atropos does, where several environments may share a name.

        A restarted environment takes over the entry of a silent namesake; a second entry would dilute its weight.
        """
        namesakes = [row for row in self._rows.values() if row.legacy and row.name == request.name]
        quiet = (row for row in namesakes if not row.connected or now - row.seen_at > LEGACY_QUIET_SECONDS)
        former = next(quiet, None)
        display_name = former.display_name if former else f"{request.name}_{len(namesakes)}"
        return self._enter(request, now, former, name=request.name, display_name=display_name, legacy=True)

    def touch(self, row: EnvironmentRow, now: float, run_id: str | None) -> None:
        """Record a sign of life, and the run that the environment takes part in."""
        row.seen_at = now
        if self._liveness is not None and row.environment_id not in self._liveness.alive_ids:
            self._liveness = None
        if not row.connected or (run_id is not None and row.run_id != run_id):
            part_of = run_id or row.run_id
            self._ledger.put_environment(msgspec.structs.replace(row, connected=True, run_id=part_of))
            row.connected, row.run_id = True, part_of

    def keep_items(self, row: EnvironmentRow, items: ItemsRow) -> None:
        """Record an environment's items; if they are of another run than those before, these are kept as well."""
        former = _before(items.run_id, row.former_items, row.items)
        self._ledger.put_environment(msgspec.structs.replace(row, items=items, former_items=former))
        row.items, row.former_items = items, former

    def item_is_open(self, name: str, run_id: str, number: int) -> bool | None:
        """Return True if an item of the environment with this name may still be rolled out, by a process or by the next
        one; False if it is settled, and None if the environment has not leased it.
        """
        row = self._by_name.get(name)
        items = row.items_in(run_id) if row is not None else None
        if items is None or number >= items.next_item:
            return None
        return number in items.leased or number in items.returned

    def count_outcome(self, outcome: str, groups: Iterable[GroupRow], *, sign: int = 1) -> None:
        """Count groups that are trained or dropped, by environment and run; the caller provides the transaction.

        A `sign` of -1 takes groups back, because they are to be trained again.
        """
        for (environment_id, run_id), number in Counter((group.env_id, group.run_id) for group in groups).items():
            row = self.find(environment_id)
            if row is not None:
                known = row.outcomes_in(run_id)
                # The counts of all but the newest runs are forgotten, and groups of such a run may be taken back.
                count = max(0, known.get(outcome, 0) + sign * number)
                outcomes = OutcomesRow(run_id=run_id, groups={**known, outcome: count})
                former = _before(run_id, row.former_outcomes, row.outcomes)
                changed = msgspec.structs.replace(row, outcomes=outcomes, former_outcomes=former)
                self._ledger.put_environment(changed)
                row.outcomes, row.former_outcomes = outcomes, former

    def presume_alive(self, now: float) -> None:
        """Count every environment's silence from now, since no call could arrive while no broker ran."""
        self._liveness = None
        for row in self._rows.values():
            row.seen_at = now

    def take_liveness(self, former: Environments) -> None:
        """Take over what the ledger does not have: when each environment called last, and the heartbeats that wait."""
        self._waiting = former._waiting
        for row in self._rows.values():
            known = former.find(row.environment_id)
            if known is not None:
                row.seen_at = known.seen_at

    def disconnect(self, environment_id: int) -> None:
        self._disconnect(self.get(environment_id))

    def disconnect_all(self) -> None:
        for row in self._rows.values():
            if row.connected:
                self._disconnect(row)

    def liveness(self, now: float, timeout_seconds: float) -> LivenessSnapshot:
        """Return the liveness snapshot: the environments whose weight and minimum count, and their sums.

        These are the ones that are connected and have called within the timeout.
        """
        if self._liveness is None or now > self._liveness.until:
            self._liveness = measure_liveness(self._rows.values(), now, timeout_seconds)
        return self._liveness

    def _disconnect(self, row: EnvironmentRow) -> None:
        self._ledger.put_environment(msgspec.structs.replace(row, connected=False))
        row.connected = False
        self._liveness = None

    def _enter(
        self,
        request: EnvironmentRequest,
        now: float,
        known: EnvironmentRow | None,
        *,
        name: str,
        display_name: str,
        legacy: bool = False,
    ) -> EnvironmentRow:
        """Record a registration; if the environment is known, it keeps its id, its items and its outcomes."""
        row = EnvironmentRow(
            environment_id=known.environment_id if known else self._next_id(),
            name=name,
            display_name=display_name,
            group_size=request.group_size,
            max_token_length=request.max_token_length,
            weight=request.weight,
            min_batch_allocation=request.min_batch_allocation,
            max_batches_offpolicy=request.max_batches_offpolicy,
            connected=True,
            registered_at=now,
            seen_at=now,
            process=request.process,
            items=known.items if known else None,
            former_items=known.former_items if known else (),
            outcomes=known.outcomes if known else OutcomesRow(),
            former_outcomes=known.former_outcomes if known else (),
            legacy=legacy,
        )
        self._ledger.put_environment(row)
        self._liveness = None
        self._rows[row.environment_id] = row
        return row

    def _next_id(self) -> int:
        return max(self._rows, default=-1) + 1


def _before(run_id: str, former: Sequence[OfRunT], last: OfRunT | None) -> tuple[OfRunT, ...]:
    """Return the newest of these rows that are of other runs, the newest last."""
    known = list(former)
    if last is not None:
        known.append(last)
    return tuple(one for one in known if one.run_id not in {run_id, NO_RUN})[-MOST_FORMER_RUNS:]


@dataclass(frozen=True, slots=True)
class LivenessSnapshot:
    """The alive environments and sums over them.

    Valid until `until`, unless an environment registers or disconnects, or one that was not alive calls.
    """

    until: float
    alive: list[EnvironmentRow]
    alive_ids: frozenset[int]
    connected_sizes: frozenset[int]
    """Group sizes of the connected environments, silent ones included."""
    largest_size: int
    token_share: float
    """Sum of `token_share_of` over the alive environments."""
    allocated: float
    """Sum of the alive environments' minima, as fractions of a batch."""
    most_batches_offpolicy: int


def measure_liveness(rows: Collection[EnvironmentRow], now: float, timeout_seconds: float) -> LivenessSnapshot:
    alive = [row for row in rows if row.connected and now - row.seen_at <= timeout_seconds]
    sizes = frozenset(row.group_size for row in rows if row.connected)
    return LivenessSnapshot(
        until=min((row.seen_at for row in alive), default=math.inf) + timeout_seconds,
        alive=alive,
        alive_ids=frozenset(row.environment_id for row in alive),
        connected_sizes=sizes,
        largest_size=max(sizes, default=1),
        token_share=sum(map(token_share_of, alive)),
        allocated=sum(row.min_batch_allocation or 0.0 for row in alive),
        most_batches_offpolicy=max((row.max_batches_offpolicy for row in rows), default=1),
    )


def token_share_of(row: EnvironmentRow) -> float:
    return row.max_token_length * max(0.0, row.weight)
