"""The ledger in SQLite with a journal before it: a submission costs one append, and goes to the database with others.

What the journal holds and the database does not is pending. Any other write comes after what is pending, and so does
the end of the process; a process that is killed leaves it to the next one, which finds it in the journal. A record that
the database has too is known by its place in the order of arrival, so it does no harm: the journal is emptied once the
database is as safe as the journal was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from atropos_api.store.base import GroupRow, KeyRow, Snapshot
from atropos_api.store.journal import Journal
from atropos_api.store.ledger_sqlite import SqliteLedger, group_of_values, key_of_values, values_of_group, values_of_key

MOST_PENDING: Final = 256
"""Groups; more would make the write that takes them to the database a long one."""

MOST_BYTES: Final = 8 * 2**20
"""A journal of this size is emptied even if that means waiting for the disk."""

KEPT_BYTES: Final = 64 * 2**10
"""Emptying the journal sooner than this is not worth the call."""

_encoder = msgspec.msgpack.Encoder()


class Submission(msgspec.Struct, array_like=True, gc=False):
    """A record: the rows of a submission as the database takes them."""

    answered_seq: int
    groups: list[tuple[Any, ...]]
    key: tuple[Any, ...] | None


_decoder = msgspec.msgpack.Decoder(Submission)


class JournaledLedger(SqliteLedger):
    """`syncs`: somebody calls `sync`, so nothing may leave the journal before the database is safe on the disk."""

    def __init__(self, path: Path, *, synchronous: str = "NORMAL", syncs: bool = False) -> None:
        self._pending: list[Submission] = []
        self._pending_groups = 0
        super().__init__(path, synchronous=synchronous)
        self._syncs = syncs
        # Places in all that was ever appended: up to where it is in the database, and up to where it is safe there.
        self._appended = self._flushed = self._safe = 0
        self._journal = Journal(path.with_name("journal"))
        self._take_over()

    def load(self) -> Snapshot:
        snapshot = super().load()
        # What is pending may be unable to go to the database: a full disk is when a broker reads its ledger again.
        for submission in self._pending:
            snapshot.groups += map(group_of_values, submission.groups)
            if submission.key is not None:
                snapshot.keys.append(key_of_values(submission.key))
            snapshot.next_seq = snapshot.groups[-1].seq + 1
            snapshot.answered_seq = submission.answered_seq
        return snapshot

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answered_seq: int) -> None:
        if self._depth:
            super().add_submission(rows, key, answered_seq=answered_seq)
            return
        if self._pending_groups + len(rows) > MOST_PENDING:
            self._flush()
        if not self._pending:
            self._empty_journal()
        submission = Submission(
            answered_seq, [values_of_group(row) for row in rows], values_of_key(key) if key is not None else None
        )
        self._journal.append(_encoder.encode(submission))
        self._appended += 1
        self._pending.append(submission)
        self._pending_groups += len(rows)
        self._note_write()

    def sync(self) -> None:
        flushed = self._flushed
        super().sync()
        self._journal.sync()
        self._safe = flushed

    def close(self) -> None:
        self._flush()
        if self._syncs:
            super().sync()
        self._journal.clear()
        self._journal.close()
        super().close()

    def _mark_dirty(self) -> None:
        if self._pending:
            self._flush()
        self._note_write()

    def _note_write(self) -> None:
        """Something was written, or is about to be; a subclass may care."""

    def _flush(self) -> None:
        """Take what is pending to the database."""
        pending, self._pending = self._pending, []
        if pending:
            try:
                self._insert(pending)
            except BaseException:
                self._pending = pending
                raise
        self._pending_groups = 0
        self._flushed = self._appended

    def _insert(self, submissions: Sequence[Submission]) -> None:
        with self.transaction():
            self._insert_groups([group for submission in submissions for group in submission.groups])
            self._insert_keys([submission.key for submission in submissions if submission.key is not None])
            self._put_answered(submissions[-1].answered_seq)

    def _empty_journal(self) -> None:
        """Called when nothing is pending: what the journal holds, the database has too."""
        if self._journal.size_bytes < KEPT_BYTES:
            return
        if self._syncs and self._safe < self._appended:
            if self._journal.size_bytes < MOST_BYTES:
                return
            self.sync()
        self._journal.clear()

    def _take_over(self) -> None:
        """Bring to the database what an earlier process left in the journal."""
        next_seq, _ = self._db.execute("SELECT next_seq, answered_seq FROM places").fetchone()
        found = [_decoder.decode(record) for record in self._journal.read()]
        missing = [submission for submission in found if submission.groups and submission.groups[0][0] >= next_seq]
        if missing:
            self._insert(missing)
        if self._journal.size_bytes:
            if self._syncs:
                super().sync()
            self._journal.clear()
        elif self._syncs:
            # It may have been made just now.
            _sync_directory(self._path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
