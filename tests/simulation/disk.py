"""A simulated disk: what survives a crash of the broker, and a ledger and a body log over it.

They implement the broker's own protocols, write all of a transaction or nothing, and fail now and then. Once their
process is dead they write nothing, whatever cleanup code still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import (
    NO_CHANGES,
    NO_RUN,
    Answers,
    BodyRef,
    EnvironmentRow,
    Event,
    GroupRow,
    KeyRow,
    MetricsRow,
    PolicyRow,
    RunRow,
    Snapshot,
)

from .world import World


@dataclass
class Disk:
    """Durable state: encoded rows by table, and bodies by their place."""

    rows: dict[str, dict[Any, bytes]] = field(default_factory=lambda: {name: {} for name in TABLES})
    unanswered: set[int] = field(default_factory=set)
    expected: dict[bytes, int] = field(default_factory=dict)
    metric_names: dict[str, list[str]] = field(default_factory=dict)
    metrics: dict[tuple[str, int], bytes] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)
    next_seq: int = 1
    next_offset: int = 1
    writes: int = 0


TABLES = {
    "runs": RunRow,
    "environments": EnvironmentRow,
    "policies": PolicyRow,
    "keys": KeyRow,
    "groups": GroupRow,
    "events": Event,
}
_encode = msgspec.msgpack.Encoder().encode


class SimulatedLedger:
    """Implements `Ledger` over a disk: a transaction is written whole at its end, or not at all."""

    def __init__(self, disk: Disk, world: World) -> None:
        self.alive = True
        self._disk = disk
        self._world = world
        self._depth = 0
        self._staged: list[Callable[[], None]] = []

    def load(self) -> Snapshot:
        disk = self._disk
        tables: dict[str, list[Any]] = {
            name: [msgspec.msgpack.decode(row, type=kind) for row in disk.rows[name].values()]
            for name, kind in TABLES.items()
        }
        return Snapshot(
            **tables, next_seq=disk.next_seq, unanswered=sorted(disk.unanswered), expected=dict(disk.expected)
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        except BaseException:
            self._staged = []
            raise
        finally:
            self._depth -= 1
        if not self._depth:
            self._commit()

    def put_run(self, row: RunRow) -> None:
        self._put("runs", row.run_id, row)

    def put_environment(self, row: EnvironmentRow) -> None:
        self._put("environments", row.environment_id, row)

    def put_policy(self, row: PolicyRow) -> None:
        self._put("policies", (row.run_id, row.version), row)

    def put_key(self, row: KeyRow) -> None:
        self._put("keys", row.key_id, row)

    def forget_keys(self, key_ids: Sequence[int]) -> None:
        self._delete("keys", key_ids)

    def add_event(self, event: Event) -> None:
        self._put("events", event.id, event)
        self._delete("events", [event.id - 50])

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_CHANGES) -> None:
        encoded = [(row.seq, _encode(row), not row.key_id) for row in rows]

        def write() -> None:
            for seq, row, unanswered in encoded:
                self._disk.rows["groups"][seq] = row
                self._disk.next_seq = max(self._disk.next_seq, seq + 1)
                if unanswered:
                    self._disk.unanswered.add(seq)

        with self.transaction():
            self._stage(write)
            self.put_answers(answers)

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_CHANGES) -> None:
        with self.transaction():
            self.add_groups(rows, answers=answers)
            if key is not None:
                self.put_key(key)

    def put_answers(self, answers: Answers) -> None:
        answered, expected = list(answers.answered), list(answers.expected)

        def write() -> None:
            self._disk.unanswered.difference_update(answered)
            for fingerprint, count in expected:
                self._disk.expected[fingerprint] = count
                if not count:
                    del self._disk.expected[fingerprint]

        self._stage(write)

    def probe(self) -> None:
        self._stage(lambda: None)

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        self._change_groups(seqs, lambda row: msgspec.structs.replace(row, batch=batch))

    def adopt_groups(self, run_id: str) -> None:
        def write() -> None:
            for seq, encoded in self._disk.rows["groups"].items():
                row = msgspec.msgpack.decode(encoded, type=GroupRow)
                if row.run_id == NO_RUN:
                    self._disk.rows["groups"][seq] = _encode(msgspec.structs.replace(row, run_id=run_id))

        self._stage(write)

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        for seq, body in list(places):
            self._change_groups([seq], lambda row, body=body: msgspec.structs.replace(row, body=body))

    def drop_groups(self, seqs: Sequence[int]) -> None:
        self._delete("groups", seqs)

    def metric_names(self) -> dict[str, list[str]]:
        return dict(self._disk.metric_names)

    def put_metric_names(self, run_id: str, names: Sequence[str]) -> None:
        kept = list(names)

        def write() -> None:
            self._disk.metric_names[run_id] = kept

        self._stage(write)

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        encoded = {(run_id, row.step): _encode(row) for row in rows}
        self._stage(lambda: self._disk.metrics.update(encoded))

    def metrics_after(self, run_id: str, step: int, limit: int) -> list[MetricsRow]:
        steps = sorted(at for run, at in self._disk.metrics if run == run_id and at > step)[:limit]
        return [msgspec.msgpack.decode(self._disk.metrics[run_id, at], type=MetricsRow) for at in steps]

    def drop_metrics(self, run_id: str, first: int, last: int) -> None:
        def write() -> None:
            for key in [key for key in self._disk.metrics if key[0] == run_id and first <= key[1] <= last]:
                del self._disk.metrics[key]

        self._stage(write)

    def forget_metrics(self, run_id: str) -> None:
        self.drop_metrics(run_id, 0, 2**63)

        def write() -> None:
            self._disk.metric_names.pop(run_id, None)

        self._stage(write)

    def sync(self) -> None:
        """Do nothing: this disk loses nothing that was written."""

    def close(self) -> None:
        self.alive = False

    def _put(self, table: str, key: Any, row: msgspec.Struct) -> None:
        encoded = _encode(row)

        def write() -> None:
            self._disk.rows[table][key] = encoded

        self._stage(write)

    def _delete(self, table: str, keys: Iterable[Any]) -> None:
        gone = list(keys)

        def write() -> None:
            for key in gone:
                self._disk.rows[table].pop(key, None)

        self._stage(write)

    def _change_groups(self, seqs: Sequence[int], change: Callable[[GroupRow], GroupRow]) -> None:
        wanted = list(seqs)

        def write() -> None:
            groups = self._disk.rows["groups"]
            for seq in wanted:
                groups[seq] = _encode(change(msgspec.msgpack.decode(groups[seq], type=GroupRow)))

        self._stage(write)

    def _stage(self, write: Callable[[], None]) -> None:
        self._staged.append(write)
        if not self._depth:
            self._commit()

    def _commit(self) -> None:
        staged, self._staged = self._staged, []
        if not self.alive or not staged:
            return
        if self._world.happens(self._world.faults.disk_fails):
            raise StoreUnavailable("the simulated disk is full; nothing was kept")
        self._disk.writes += 1
        for write in staged:
            write()


class SimulatedBodies:
    """Implements `BodyLog` over a disk."""

    def __init__(self, disk: Disk) -> None:
        self.alive = True
        self._disk = disk

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        refs = []
        for body in bodies:
            refs.append(BodyRef(0, self._disk.next_offset, len(body)))
            self._disk.bodies[self._disk.next_offset] = body
            self._disk.next_offset += 1
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        return [self._disk.bodies[ref.offset] for ref in refs]

    def discard(self, refs: Iterable[BodyRef]) -> None:
        for ref in refs:
            if self.alive:
                self._disk.bodies.pop(ref.offset, None)

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        living = list(refs)
        missing = [ref for ref in living if ref.offset not in self._disk.bodies]
        known = {ref.offset for ref in living}
        for offset in [offset for offset in self._disk.bodies if offset not in known]:
            del self._disk.bodies[offset]
        return missing

    def sparse_segments(self) -> list[int]:
        return []

    def sync(self) -> None:
        """Do nothing: this disk loses nothing that was written."""

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:
        return True

    def size_bytes(self) -> int:
        return sum(map(len, self._disk.bodies.values()))

    def close(self) -> None:
        self.alive = False
