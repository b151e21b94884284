"""What the journal holds and the database does not: writes by kind, of which only their sum goes to the database.

Most rows of a busy broker never get there: a group that was queued, batched and committed since the last flush is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from atropos_api.store.base import EnvironmentRow, Event, RunRow, Snapshot
from atropos_api.store.rows import BATCH_PLACE, KEY_PLACE, group_of_values, key_of_values, policy_of_values

Write = tuple[Any, ...]
"""One write: its kind, and what it says, of types that msgpack knows."""


class Kind:
    """The kinds of writes, as the journal names them."""

    GROUPS: Final = "groups"
    ANSWERS: Final = "answers"
    KEY: Final = "key"
    FORGET: Final = "forget"
    BATCH: Final = "batch"
    DROP: Final = "drop"
    POLICY: Final = "policy"
    RUN: Final = "run"
    ENVIRONMENT: Final = "environment"
    EVENT: Final = "event"


class Pending:
    """The sum of some writes over a database. Values of groups and keys are as `store.rows` gives them."""

    def __init__(self) -> None:
        self.count = 0
        """Of the writes, each group counted."""
        self.groups: dict[int, list[Any]] = {}
        """By seq: rows that the database has not."""
        self.batches: dict[int, int] = {}
        """By seq: new batches of rows that it has."""
        self.dropped: set[int] = set()
        """Seqs of rows that it has."""
        self.keys: dict[int, Sequence[Any]] = {}
        self.forgotten: set[int] = set()
        self.policies: dict[tuple[str, int], Sequence[Any]] = {}
        self.runs: dict[str, bytes] = {}
        self.environments: dict[int, bytes] = {}
        self.events: dict[int, bytes] = {}
        self.next_seq: int | None = None
        self.unanswered: set[int] = set()
        """Seqs that the database has not; `answered`: seqs that it has."""
        self.answered: set[int] = set()
        self.expected: dict[bytes, int] = {}
        self._appliers: dict[str, Callable[..., None]] = {
            Kind.GROUPS: self._add_groups,
            Kind.ANSWERS: self._put_answers,
            Kind.KEY: self._put_key,
            Kind.FORGET: self._forget,
            Kind.BATCH: self._assign,
            Kind.DROP: self._drop,
            Kind.POLICY: self._put_policy,
            Kind.RUN: self.runs.__setitem__,
            Kind.ENVIRONMENT: self.environments.__setitem__,
            Kind.EVENT: self.events.__setitem__,
        }

    def apply(self, writes: Iterable[Sequence[Any]]) -> None:
        for kind, *arguments in writes:
            self._appliers[kind](*arguments)
            self.count += len(arguments[0]) if kind == Kind.GROUPS else 1

    def overlay(self, snapshot: Snapshot) -> Snapshot:
        """What the database would hold with these writes in it."""
        groups = {row.seq: row for row in snapshot.groups if row.seq not in self.dropped}
        for seq, batch in self.batches.items():
            groups[seq].batch = batch
        groups |= {seq: group_of_values(values) for seq, values in self.groups.items()}
        keys = {row.key_id: row for row in snapshot.keys if row.key_id not in self.forgotten}
        keys |= {key_id: key_of_values(values) for key_id, values in self.keys.items()}
        runs = {row.run_id: row for row in snapshot.runs}
        runs |= {run_id: msgspec.json.decode(row, type=RunRow) for run_id, row in self.runs.items()}
        environments = {row.environment_id: row for row in snapshot.environments}
        environments |= {id_: msgspec.json.decode(row, type=EnvironmentRow) for id_, row in self.environments.items()}
        policies = {(row.run_id, row.version): row for row in snapshot.policies}
        policies |= {place: policy_of_values(values) for place, values in self.policies.items()}
        events = {event.id: event for event in snapshot.events}
        events |= {id_: msgspec.json.decode(row, type=Event) for id_, row in self.events.items()}
        return Snapshot(
            runs=list(runs.values()),
            environments=[environments[id_] for id_ in sorted(environments)],
            groups=[groups[seq] for seq in sorted(groups)],
            keys=[keys[key_id] for key_id in sorted(keys)],
            policies=sorted(policies.values(), key=lambda row: row.version),
            events=[events[id_] for id_ in sorted(events)],
            next_seq=snapshot.next_seq if self.next_seq is None else self.next_seq,
            unanswered=sorted({*snapshot.unanswered} - self.answered | self.unanswered),
            expected={print_: count for print_, count in (snapshot.expected | self.expected).items() if count},
        )

    def _add_groups(self, rows: Sequence[Sequence[Any]], *answers: Sequence[Any]) -> None:
        for values in rows:
            self.groups[values[0]] = list(values)
            if not values[KEY_PLACE]:
                self.unanswered.add(values[0])
        if rows:
            self.next_seq = rows[-1][0] + 1
        self._put_answers(*answers)

    def _put_answers(self, answered: Sequence[int], expected: Sequence[tuple[bytes, int]]) -> None:
        for seq in answered:
            if seq in self.unanswered:
                self.unanswered.remove(seq)
            else:
                self.answered.add(seq)
        self.expected.update(expected)

    def _put_key(self, values: Sequence[Any]) -> None:
        self.keys[values[0]] = values

    def _put_policy(self, values: Sequence[Any]) -> None:
        run_id, version, *_ = values
        self.policies[run_id, version] = values

    def _forget(self, key_ids: Sequence[int]) -> None:
        for key_id in key_ids:
            self.keys.pop(key_id, None)
        self.forgotten.update(key_ids)

    def _assign(self, seqs: Sequence[int], batch: int) -> None:
        for seq in seqs:
            values = self.groups.get(seq)
            if values is None:
                self.batches[seq] = batch
            else:
                values[BATCH_PLACE] = batch

    def _drop(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            if self.groups.pop(seq, None) is None:
                self.dropped.add(seq)
                self.batches.pop(seq, None)
