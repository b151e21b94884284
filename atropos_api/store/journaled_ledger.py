"""The ledger in SQLite behind a journal: a transaction costs one append, and goes to the database with others.

Writes that are in the journal but not in the database are pending. A few kinds of writes go to the database at once,
and take the pending ones along; an orderly exit does so too. A killed process leaves its pending writes in the journal,
where the next process finds them. Records are numbered and the database stores the last number it has, so none is
applied twice: they are deleted from the journal once the database is as safe as the journal was.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import (
    NO_NEWS,
    Answers,
    BodyRef,
    EnvironmentRow,
    Event,
    GroupRow,
    KeyRow,
    PolicyRow,
    RunRow,
    Snapshot,
)
from atropos_api.store.journal import JournalPair, Kind, Write, WriteBuffer
from atropos_api.store.sqlite_ledger import SqliteLedger, encode_row, values_of_group, values_of_key, values_of_policy

MOST_PENDING: Final = 1024
"""Most pending writes, each group counted; more would make the write that flushes them slow."""

MOST_BYTES: Final = 8 * 2**20
"""A journal of this size is emptied even if that means waiting for the disk."""

KEPT_BYTES: Final = 64 * 2**10
"""A journal smaller than this is not emptied: that would not be worth the call."""

Direct = Callable[[], None]
"""A write that only the database can make, because it does not list the rows it changes."""


class Record(msgspec.Struct, array_like=True, gc=False, tag="writes-5"):
    """A transaction as stored in the journal. The tag changes with the form of the writes."""

    number: int
    writes: Sequence[Sequence[Any]]


_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(Record)


class JournaledLedger(SqliteLedger):
    """The SQLite ledger with a journal.

    `syncs`: somebody calls `sync`, so no record may be deleted from the journal before the database is safe on the
    disk.
    """

    def __init__(self, path: Path, *, synchronous: str = "NORMAL", syncs: bool = False) -> None:
        self._pending = WriteBuffer()
        self._staged: list[Write | Direct] | None = None
        super().__init__(path, synchronous=synchronous)
        self._syncs = syncs
        # Numbers of the last record made, the last one in the database, and the last one safe on disk there.
        self._made = self._flushed = self._safe = 0
        self._journal = JournalPair(path.with_name("journal"))
        self._take_over()

    def load(self) -> Snapshot:
        # Pending writes may not fit into the database: a full disk is when a broker reads its ledger again.
        return self._pending.overlay(super().load())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._staged is not None:
            yield
            return
        staged: list[Write | Direct] = []
        self._staged = staged
        try:
            yield
            self._keep(staged)
        finally:
            self._staged = None

    def put_run(self, row: RunRow) -> None:
        self._stage((Kind.RUN, row.run_id, encode_row(row)))

    def put_environment(self, row: EnvironmentRow) -> None:
        self._stage((Kind.ENVIRONMENT, row.environment_id, encode_row(row)))

    def put_policy(self, row: PolicyRow) -> None:
        self._stage((Kind.POLICY, values_of_policy(row)))

    def put_key(self, row: KeyRow) -> None:
        self._stage((Kind.KEY, values_of_key(row)))

    def forget_keys(self, key_ids: Sequence[int]) -> None:
        self._stage((Kind.FORGET, list(key_ids)))

    def add_event(self, event: Event) -> None:
        self._stage((Kind.EVENT, event.id, encode_row(event)))

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_NEWS) -> None:
        self._stage((Kind.GROUPS, [values_of_group(row) for row in rows], *answers))

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_NEWS) -> None:
        groups = (Kind.GROUPS, list(map(values_of_group, rows)), *answers)
        writes: list[Write] = [groups] if key is None else [groups, (Kind.KEY, values_of_key(key))]
        if self._staged is None:
            self._append(writes)
        else:
            self._staged += writes

    def put_answers(self, answers: Answers) -> None:
        self._stage((Kind.ANSWERS, *answers))

    def probe(self) -> None:
        self._stage(super().probe)

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        self._stage((Kind.BATCH, list(seqs), batch))

    def drop_groups(self, seqs: Sequence[int]) -> None:
        self._stage((Kind.DROP, list(seqs)))

    def adopt_groups(self, run_id: str) -> None:
        self._stage(functools.partial(super().adopt_groups, run_id))

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        self._stage(functools.partial(super().move_groups, list(places)))

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
        self._note_write()

    def _note_write(self) -> None:
        """Do nothing; a subclass overrides it to learn that something was written, or is about to be."""

    def _stage(self, write: Write | Direct) -> None:
        if self._staged is None:
            self._keep([write])
        else:
            self._staged.append(write)

    def _keep(self, staged: list[Write | Direct]) -> None:
        """Keep all of a transaction, or nothing of it."""
        writes = [write for write in staged if isinstance(write, tuple)]
        if len(writes) < len(staged):
            self._flush()
            self._write_through(staged)
        elif writes:
            self._append(writes)

    def _append(self, writes: list[Write]) -> None:
        if self._pending.count >= MOST_PENDING:
            self._flush()
        if not self._pending.count:
            self._empty_journal()
        self._journal.forget(self._safe)
        self._journal.append(_encoder.encode(Record(self._made + 1, writes)))
        self._made += 1
        self._pending.apply(writes)
        self._note_write()
        if self._pending.count >= MOST_PENDING:
            # Flush now: the next write may be a batch that a trainer waits for. This write is kept already, so a
            # failure is left to the next one.
            with suppress(StoreUnavailable):
                self._flush()

    def _write_through(self, staged: list[Write | Direct]) -> None:
        with super().transaction():
            rest = WriteBuffer()
            for write in staged:
                if isinstance(write, tuple):
                    rest.apply([write])
                else:
                    self._insert(rest)
                    rest = WriteBuffer()
                    write()
            self._insert(rest)

    def _flush(self) -> None:
        """Write what is pending to the database."""
        if self._pending.count:
            with super().transaction():
                self._insert(self._pending)
                self._execute("UPDATE places SET journaled = ?", (self._made,))
        self._pending = WriteBuffer()
        self._flushed = self._made

    def _insert(self, pending: WriteBuffer) -> None:
        self._insert_groups(list(pending.groups.values()))
        self._update_batches([(batch, seq) for seq, batch in pending.batches.items()])
        self._delete_groups(list(pending.dropped))
        self._delete_keys(list(pending.forgotten))
        self._insert_keys(list(pending.keys.values()))
        self._insert_policies(list(pending.policies.values()))
        self._insert_runs(list(pending.runs.items()))
        self._insert_environments(list(pending.environments.items()))
        self._insert_events(list(pending.events.items()))
        if pending.next_seq is not None:
            self._put_next(pending.next_seq)
        self._delete_unanswered(pending.answered)
        self._insert_unanswered(pending.unanswered)
        self._put_expected(list(pending.expected.items()))

    def _empty_journal(self) -> None:
        """Empty the journal or switch its files. Nothing is pending, so the database has all that the journal has."""
        size = self._journal.size_bytes
        if self._syncs and size >= MOST_BYTES:
            self.sync()
        if (not self._syncs and size >= KEPT_BYTES) or size >= MOST_BYTES:
            self._journal.clear()
        elif self._syncs:
            self._journal.turn(self._made)

    def _take_over(self) -> None:
        """Write to the database what an earlier process left in the journal."""
        (known,) = self._db.execute("SELECT journaled FROM places").fetchone()
        try:
            found = [_decoder.decode(record) for record in self._journal.read()]
        except msgspec.DecodeError as error:
            raise StoreDamaged(
                f"{self._path.with_name('journal')} was written by another release ({error}); start and stop that one "
                "on this directory, or begin anew with --fresh"
            ) from None
        self._made = max((record.number for record in found), default=known)
        self._pending.apply(write for record in found if record.number > known for write in record.writes)
        self._flush()
        if self._journal.size_bytes:
            if self._syncs:
                super().sync()
            self._journal.clear()
        elif self._syncs:
            # The journal file may have been created just now, and its directory entry must survive too.
            _sync_directory(self._path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
