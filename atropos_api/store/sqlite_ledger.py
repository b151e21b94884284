"""The ledger in SQLite: one file in write-ahead-log mode, locked by one writer for as long as it is open.

A transaction is appended to the write-ahead log before it returns, so a killed process loses none; `sync` forces the
log to the disk. SQLite copies a log of 16 MiB to the database, within one transaction.

Rows of groups, keys and policies are converted to the flat values of a database table, and back.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import astuple

from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import (
    KEPT_EVENTS,
    NO_CHANGES,
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

SCHEMA_VERSION: Final = 8

SCHEMA: Final = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE environments (environment_id INTEGER PRIMARY KEY, row BLOB NOT NULL);
CREATE TABLE policies (
    run_id TEXT, version INTEGER, step INTEGER, published_at REAL, orphaned INTEGER, PRIMARY KEY (run_id, version)
) WITHOUT ROWID;
CREATE TABLE keys (
    key_id INTEGER PRIMARY KEY, owner TEXT, key TEXT, group_count INTEGER, used_at REAL, done_at REAL
);
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, run_id TEXT, env_id INTEGER, size INTEGER, token_count INTEGER,
    segment INTEGER, offset INTEGER, length INTEGER, received_version INTEGER, oldest_version INTEGER,
    arrived_at REAL, batch INTEGER, key_id INTEGER, form TEXT NOT NULL DEFAULT 'json', policy TEXT
);
CREATE TABLE places (one INTEGER PRIMARY KEY CHECK (one = 1), next_seq INTEGER);
INSERT INTO places VALUES (1, 1);
CREATE TABLE events (id INTEGER PRIMARY KEY, row BLOB NOT NULL);
CREATE TABLE unanswered (seq INTEGER PRIMARY KEY);
CREATE TABLE expected (fingerprint BLOB PRIMARY KEY, count INTEGER) WITHOUT ROWID;
CREATE TABLE metric_names (run_id TEXT PRIMARY KEY, names BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE metrics (
    run_id TEXT, step INTEGER, time REAL, numbers BLOB, PRIMARY KEY (run_id, step)
) WITHOUT ROWID;
"""

UPGRADES: Final = {
    1: "ALTER TABLE groups ADD COLUMN form TEXT NOT NULL DEFAULT 'json';",
    2: "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, row BLOB NOT NULL);",
    3: "",  # a column was added that is not read any more
    4: """
CREATE TABLE unanswered (seq INTEGER PRIMARY KEY);
CREATE TABLE expected (fingerprint BLOB PRIMARY KEY, count INTEGER) WITHOUT ROWID;
INSERT INTO unanswered SELECT seq FROM groups WHERE key_id = 0 AND seq > (SELECT answered_seq FROM places);
ALTER TABLE places DROP COLUMN answered_seq;
""",
    5: "",  # the number alone: `next_seq` is not written by each submission, which an older release would not expect
    6: """
CREATE TABLE IF NOT EXISTS metric_names (run_id TEXT PRIMARY KEY, names BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS metrics (
    run_id TEXT, step INTEGER, time REAL, numbers BLOB, PRIMARY KEY (run_id, step)
) WITHOUT ROWID;
""",
    7: "ALTER TABLE groups ADD COLUMN policy TEXT;",
}
"""SQL that upgrades a ledger of an older schema to the next one."""

TRIM_EVERY: Final = 100
PAGE_BYTES: Final = 1024
"""Size of a page, all of which is written for a row: SQLite's 4 KiB cost 4 % of a small submission's time."""

CHECKPOINT_PAGES: Final = 16 * 1024
"""Pages in the write-ahead log from which on it is copied to the database, which waits for the disk."""

RowT = TypeVar("RowT", bound=msgspec.Struct)

encode_row = msgspec.json.Encoder().encode


class SqliteLedger:
    """Rows in one database. `synchronous` is SQLite's setting: NORMAL survives a crash, `sync` a power failure."""

    def __init__(self, path: Path, *, synchronous: str = "NORMAL") -> None:
        self._path = path
        self._transaction = _Transaction(self)
        self.written = threading.Event()
        """Set at each write; `sync` may be due."""
        try:
            # The server may close it in another thread, so the connection is not tied to the opening one.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
            self._db.execute(f"PRAGMA page_size={PAGE_BYTES}")
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={synchronous}")
            self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            self._prepare_schema()
            self._files = OpenedFiles([str(path), f"{path}-wal"])
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"{path} cannot be opened ({error}); check its disk and its owner") from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def load(self) -> Snapshot:
        with self._reading():
            return self._load()

    def _load(self) -> Snapshot:
        (next_seq,) = self._db.execute("SELECT next_seq FROM places").fetchone()
        groups = [group_of_values(row) for row in self._db.execute("SELECT * FROM groups ORDER BY seq")]
        return Snapshot(
            runs=self._decoded(RunRow, "SELECT row FROM runs"),
            environments=self._decoded(EnvironmentRow, "SELECT row FROM environments ORDER BY environment_id"),
            groups=groups,
            keys=[row_of_values(KeyRow, row) for row in self._db.execute("SELECT * FROM keys ORDER BY key_id")],
            policies=[policy_of_values(row) for row in self._db.execute("SELECT * FROM policies ORDER BY version")],
            events=self._decoded(Event, "SELECT row FROM events ORDER BY id"),
            next_seq=max(next_seq, groups[-1].seq + 1) if groups else next_seq,
            unanswered=[seq for (seq,) in self._db.execute("SELECT seq FROM unanswered ORDER BY seq")],
            expected=dict(self._db.execute("SELECT fingerprint, count FROM expected")),
        )

    def dump(self) -> bytes:
        return self._db.serialize()

    def transaction(self) -> AbstractContextManager[None]:
        """Keep all writes or none; a transaction inside another is a part of it."""
        return self._transaction

    def put_run(self, row: RunRow) -> None:
        self._execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (row.run_id, encode_row(row)))

    def put_environment(self, row: EnvironmentRow) -> None:
        self._execute("INSERT OR REPLACE INTO environments VALUES (?, ?)", (row.environment_id, encode_row(row)))

    def put_policy(self, row: PolicyRow) -> None:
        self._execute("INSERT OR REPLACE INTO policies VALUES (?, ?, ?, ?, ?)", astuple(row))

    def put_key(self, row: KeyRow) -> None:
        self._execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?, ?)", astuple(row))

    def forget_keys(self, key_ids: Sequence[int]) -> None:
        with self.transaction():
            self._execute_many("DELETE FROM keys WHERE key_id = ?", [(key_id,) for key_id in key_ids])

    def add_event(self, event: Event) -> None:
        with self.transaction():
            self._execute("INSERT OR REPLACE INTO events VALUES (?, ?)", (event.id, encode_row(event)))
            if event.id % TRIM_EVERY == 0:
                self._execute(
                    "DELETE FROM events WHERE id <= (SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?)",
                    (KEPT_EVENTS,),
                )

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_CHANGES) -> None:
        self.add_submission(rows, None, answers=answers)

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_CHANGES) -> None:
        with self._transaction:
            self._execute_many(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [values_of_group(row) for row in rows],
            )
            self._execute_many("INSERT INTO unanswered VALUES (?)", [(row.seq,) for row in rows if not row.key_id])
            if any(answers):
                self.put_answers(answers)
            if key is not None:
                self.put_key(key)

    def put_answers(self, answers: Answers) -> None:
        present = [(fingerprint, count) for fingerprint, count in answers.expected if count]
        gone = [(fingerprint,) for fingerprint, count in answers.expected if not count]
        with self.transaction():
            self._execute_many("DELETE FROM unanswered WHERE seq = ?", [(seq,) for seq in answers.answered])
            self._execute_many("INSERT OR REPLACE INTO expected VALUES (?, ?)", present)
            self._execute_many("DELETE FROM expected WHERE fingerprint = ?", gone)

    def probe(self) -> None:
        self._execute("UPDATE places SET next_seq = next_seq")

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        with self.transaction():
            self._execute_many("UPDATE groups SET batch = ? WHERE seq = ?", [(batch, seq) for seq in seqs])

    def adopt_groups(self, run_id: str) -> None:
        self._execute("UPDATE groups SET run_id = ? WHERE run_id = ''", (run_id,))

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        with self.transaction():
            self._execute_many(
                "UPDATE groups SET segment = ?, offset = ?, length = ? WHERE seq = ?",
                [(*body, seq) for seq, body in places],
            )

    def drop_groups(self, seqs: Sequence[int]) -> None:
        with self.transaction():
            # Not written by each submission, which it would slow down: while groups are stored, it follows from them.
            self._execute("UPDATE places SET next_seq = max(next_seq, coalesce((SELECT max(seq) FROM groups), 0) + 1)")
            self._execute_many("DELETE FROM groups WHERE seq = ?", [(seq,) for seq in seqs])

    def metric_names(self) -> dict[str, list[str]]:
        with self._reading():
            rows = self._db.execute("SELECT run_id, names FROM metric_names")
            return {run_id: msgspec.json.decode(names, type=list[str]) for run_id, names in rows}

    def put_metric_names(self, run_id: str, names: Sequence[str]) -> None:
        self._execute("INSERT OR REPLACE INTO metric_names VALUES (?, ?)", (run_id, encode_row(list(names))))

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        with self.transaction():
            self._execute_many("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", [(run_id, *row) for row in rows])

    def metrics_after(self, run_id: str, step: int, limit: int) -> list[MetricsRow]:
        query = "SELECT step, time, numbers FROM metrics WHERE run_id = ? AND step > ? ORDER BY step LIMIT ?"
        with self._reading():
            return [MetricsRow(*values) for values in self._db.execute(query, (run_id, step, limit))]

    def drop_metrics(self, run_id: str, first: int, last: int) -> None:
        self._execute("DELETE FROM metrics WHERE run_id = ? AND step BETWEEN ? AND ?", (run_id, first, last))

    def forget_metrics(self, run_id: str) -> None:
        with self.transaction():
            self._execute("DELETE FROM metrics WHERE run_id = ?", (run_id,))
            self._execute("DELETE FROM metric_names WHERE run_id = ?", (run_id,))

    def sync(self) -> None:
        """Force the write-ahead log to the disk; may be called from another thread."""
        try:
            descriptor = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._db.close()

    def _prepare_schema(self) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found == 0:
            self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            return
        while found in UPGRADES:
            self._db.executescript(f"BEGIN; {UPGRADES[found]} PRAGMA user_version = {found + 1}; COMMIT;")
            found += 1
        if found != SCHEMA_VERSION:
            raise StoreDamaged(
                f"{self._path} was written by another release (schema {found}, this one has {SCHEMA_VERSION}); "
                "finish its run with that release or begin anew with --fresh"
            )

    def _decoded(self, kind: type[RowT], query: str) -> list[RowT]:
        return [msgspec.json.decode(row, type=kind) for (row,) in self._db.execute(query)]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise errors of reading as an outage if the system reports one, else as damage."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"{self._path} cannot be read ({error}); check its disk and its owner") from error
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> StoreDamaged:
        return StoreDamaged(f"{self._path} cannot be used as the broker's ledger: {error}; --fresh begins anew")

    def begin_transaction(self) -> None:
        """Begin a transaction. Raises `StoreUnavailable`; none has begun then."""
        self._execute("BEGIN IMMEDIATE")

    def end_transaction(self, *, keep: bool) -> None:
        """Keep the writes of the transaction, or undo them. Raises `StoreUnavailable` if they cannot be kept."""
        try:
            if keep:
                self._execute("COMMIT")
        finally:
            if self._db.in_transaction:
                with suppress(sqlite3.DatabaseError):
                    self._db.execute("ROLLBACK")

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        if not self._transaction.depth:
            self._files.require_in_place()
        self._note_write()
        try:
            self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise _unavailable(error) from error

    def _execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        if not rows:
            return
        self._note_write()
        try:
            self._db.executemany(statement, rows)
        except sqlite3.DatabaseError as error:
            raise _unavailable(error) from error

    def _note_write(self) -> None:
        if not self.written.is_set():
            self.written.set()


class _Transaction:
    """The transaction of a ledger: one object for all of them, since a generator for each cost 4 us a submission."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self.depth = 0

    def __enter__(self) -> None:
        if not self.depth:
            self._ledger.begin_transaction()
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.depth == 1:
                self._ledger.end_transaction(keep=kind is None)
        finally:
            self.depth -= 1


class OpenedFiles:
    """Files that SQLite has open: it goes on writing to one that is removed or replaced, and all of that would be lost.

    SQLite never makes these files shorter, so one that is shorter was cut by another program.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Device, inode and bytes of each."""

    def require_in_place(self) -> None:
        """Raise `StoreUnavailable` if a file is not the one that it was, or is shorter."""
        for path in self._paths:
            before = self._seen.get(path)
            try:
                found = os.stat(path)  # noqa: PTH116 - three times as fast, at each transaction
            except OSError:
                if before is None:  # SQLite makes the log at the first write
                    continue
                raise _replaced(path) from None
            now = (found.st_dev, found.st_ino, found.st_size)
            if before is not None and (now[:2] != before[:2] or now[2] < before[2]):
                raise _replaced(path)
            self._seen[path] = now


def _replaced(path: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{path} was removed, replaced or cut by someone else while the broker worked; put it back or restart the "
        "broker; nothing was kept"
    )


def _unavailable(error: sqlite3.DatabaseError) -> StoreUnavailable:
    return StoreUnavailable(f"the store's ledger cannot be written ({error}); nothing was kept")


def values_of_group(row: GroupRow) -> tuple[Any, ...]:
    seq, run_id, env_id, size, token_count, body, *rest = astuple(row)
    return (seq, run_id, env_id, size, token_count, *body, *rest)


def group_of_values(values: Sequence[Any]) -> GroupRow:
    seq, run_id, env_id, size, token_count, segment, offset, length, *rest = values
    return row_of_values(GroupRow, (seq, run_id, env_id, size, token_count, BodyRef(segment, offset, length), *rest))


def policy_of_values(values: Sequence[Any]) -> PolicyRow:
    *others, orphaned = values
    return row_of_values(PolicyRow, (*others, bool(orphaned)))


def row_of_values(kind: type[RowT], values: Sequence[Any]) -> RowT:
    """Return the row whose fields have these values; a table's columns have the order of the row's fields."""
    return kind(**dict(zip(kind.__struct_fields__, values, strict=True)))
