"""The journal: writes are appended to a file first, and go to the database later, as their sum.

A record is its length, its CRC-32, and the bytes. Reading ends at the first record that is not whole: only the last
append before a crash can be incomplete, and it was never acknowledged. `JournalPair` alternates between two files.
`WriteBuffer` holds the sum of the writes that are in the journal but not in the database. Most rows of a busy broker
never reach the database: a group that was queued, batched and committed since the last flush has no row any more.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from isal import isal_zlib

from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import EnvironmentRow, Event, RunRow, Snapshot
from atropos_api.store.sqlite_ledger import BATCH_PLACE, KEY_PLACE, group_of_values, key_of_values, policy_of_values

HEADER: Final = struct.Struct("<II")


class Journal:
    """An append-only file that is emptied from time to time."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read(self) -> list[bytes]:
        data = os.pread(self._descriptor, self.size_bytes, 0)
        records = []
        place = 0
        while place + HEADER.size <= len(data):
            length, checksum = HEADER.unpack_from(data, place)
            record = data[place + HEADER.size : place + HEADER.size + length]
            # A power failure may leave a file of the right length with zeroes in it.
            if not record or len(record) != length or isal_zlib.crc32(record) != checksum:
                break
            records.append(record)
            place += HEADER.size + length
        return records

    def append(self, record: bytes) -> None:
        """Append a record: on return the kernel has it, or an error was raised and nothing of it is in the file."""
        data = HEADER.pack(len(record), isal_zlib.crc32(record)) + record
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise StoreUnavailable(
                f"the store cannot be written ({error.strerror}); free space on its disk, nothing was kept"
            ) from error
        if written != len(data):
            os.ftruncate(self._descriptor, self.size_bytes)
            raise StoreUnavailable(f"the disk took {written} of {len(data)} bytes; free space on it, nothing was kept")
        self.size_bytes += len(data)

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.size_bytes = 0

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class JournalPair:
    """Two journal files used alternately.

    The records of one wait until the database that has them is safe on disk, while the other takes new ones.
    """

    def __init__(self, path: Path) -> None:
        self._both = (Journal(path), Journal(path.with_name(f"{path.name}-2")))
        self._active, self._waiting = self._both
        self._waits_for = 0

    @property
    def size_bytes(self) -> int:
        return sum(journal.size_bytes for journal in self._both)

    def read(self) -> list[bytes]:
        return [record for journal in self._both for record in journal.read()]

    def append(self, record: bytes) -> None:
        self._active.append(record)

    def turn(self, number: int) -> None:
        """Switch files: the database has all records up to `number`; they may go once it is safe on disk."""
        if self._active.size_bytes and not self._waiting.size_bytes:
            self._active, self._waiting = self._waiting, self._active
            self._waits_for = number

    def forget(self, safe: int) -> None:
        """Delete the waiting records if the database is safe on disk up to record `safe`."""
        if self._waiting.size_bytes and safe >= self._waits_for:
            self._waiting.clear()

    def clear(self) -> None:
        for journal in self._both:
            journal.clear()

    def sync(self) -> None:
        """Force both files to the disk; may be called from another thread."""
        for journal in self._both:
            if journal.size_bytes:
                journal.sync()

    def close(self) -> None:
        for journal in self._both:
            journal.close()


Write = tuple[Any, ...]
"""One write: its kind and its arguments, of types that msgpack knows."""


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


class WriteBuffer:
    """The sum of some writes that a database lacks.

    Values of groups, keys and policies are as `sqlite_ledger.values_of_group` and its like return them.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of writes, each group counted."""
        self.groups: dict[int, list[Any]] = {}
        """New rows by seq, which the database does not have."""
        self.batches: dict[int, int] = {}
        """New batch numbers by seq, of rows that the database has."""
        self.dropped: set[int] = set()
        """Seqs of dropped rows that the database has."""
        self.keys: dict[int, Sequence[Any]] = {}
        self.forgotten: set[int] = set()
        self.policies: dict[tuple[str, int], Sequence[Any]] = {}
        self.runs: dict[str, bytes] = {}
        self.environments: dict[int, bytes] = {}
        self.events: dict[int, bytes] = {}
        self.next_seq: int | None = None
        self.unanswered: set[int] = set()
        """Unanswered seqs that the database does not have; `answered`: now answered seqs that it has."""
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
        """Return the snapshot that the database would hold with these writes in it."""
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
