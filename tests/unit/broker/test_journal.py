"""A submission that was kept in the journal alone is as safe as one in the database, and never comes twice."""

import os
import shutil

import pytest

from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import BodyRef, GroupRow, KeyRow
from atropos_api.store.journal import Journal
from atropos_api.store.ledger_journaled import MOST_PENDING, JournaledLedger


def make_row(seq, **changes):
    values = {
        "seq": seq, "run_id": "", "env_id": 3, "size": 4, "token_count": 40, "body": BodyRef(1, 12 * seq, 5),
        "received_version": None, "oldest_version": 2, "arrived_at": 1.5,
    }  # fmt: skip
    return GroupRow(**(values | changes))


def make_key(seq):
    return KeyRow(key_id=seq, owner="env", key=f"key {seq}", group_count=1, used_at=2.5)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def ledger(directory):
    opened = JournaledLedger(directory / "ledger.sqlite", syncs=True)
    yield opened
    opened.close()


def submit(ledger, *seqs):
    for seq in seqs:
        ledger.add_submission([make_row(seq, key_id=seq)], make_key(seq), answered_seq=seq - 1)


def left_by_a_kill(directory, name="killed"):
    """A copy of the files as they are now: what a process finds whose predecessor was killed at this moment."""
    copy = directory.with_name(name)
    shutil.copytree(directory, copy)
    return copy


def found_in(directory):
    ledger = JournaledLedger(directory / "ledger.sqlite", syncs=True)
    snapshot = ledger.load()
    ledger.close()
    return snapshot


def seqs(snapshot):
    return [group.seq for group in snapshot.groups]


def test_what_was_kept_is_found_after_a_kill(ledger, directory):
    submit(ledger, 1, 2, 3)
    found = found_in(left_by_a_kill(directory))
    assert found.groups == [make_row(seq, key_id=seq) for seq in (1, 2, 3)]
    assert found.keys == [make_key(seq) for seq in (1, 2, 3)]
    assert (found.next_seq, found.answered_seq) == (4, 2)


def test_what_is_pending_is_read_again_though_the_database_takes_nothing(ledger):
    submit(ledger, 1, 2)
    ledger.assign_batch([1], 1)
    submit(ledger, 3)
    ledger._db.execute("PRAGMA query_only = ON")
    snapshot = ledger.load()
    ledger._db.execute("PRAGMA query_only = OFF")
    assert [(group.seq, group.batch) for group in snapshot.groups] == [(1, 1), (2, 0), (3, 0)]
    assert snapshot.keys == [make_key(seq) for seq in (1, 2, 3)]
    assert (snapshot.next_seq, snapshot.answered_seq) == (4, 2)
    assert ledger.load() == snapshot


def test_a_record_cut_short_is_nothing_and_costs_its_neighbours_nothing(ledger, directory):
    submit(ledger, 1, 2)
    whole = (directory / "journal").stat().st_size
    submit(ledger, 3)
    size = (directory / "journal").stat().st_size
    for cut in range(whole, size, 7):
        copy = left_by_a_kill(directory, f"cut {cut}")
        with (copy / "journal").open("r+b") as file:
            file.truncate(cut)
        assert seqs(found_in(copy)) == [1, 2]


def test_a_kill_between_the_database_and_the_emptying_of_the_journal_repeats_nothing(ledger, directory):
    submit(ledger, 1, 2, 3)
    ledger.drop_groups([1])
    ledger.assign_batch([2], 7)
    assert (directory / "journal").stat().st_size > 0
    found = found_in(left_by_a_kill(directory))
    assert [(group.seq, group.batch) for group in found.groups] == [(2, 7), (3, 0)]


def test_a_dropped_group_stays_dropped_though_the_journal_still_has_it(ledger, directory):
    submit(ledger, 1, 2)
    ledger.drop_groups([1, 2])
    assert found_in(left_by_a_kill(directory)).groups == []
    assert found_in(left_by_a_kill(directory, "again")).next_seq == 3


def test_what_was_synced_survives_a_loss_of_power_that_takes_the_database_back(ledger, directory):
    ledger.sync()
    before = left_by_a_kill(directory, "before")
    submit(ledger, 1, 2)
    ledger.sync()
    ledger.assign_batch([1], 1)
    # The write to the database was not forced to the disk, so the power may take it; the journal was.
    shutil.copy(directory / "journal", before / "journal")
    assert seqs(found_in(before)) == [1, 2]


def test_the_journal_is_emptied_once_the_database_is_safe(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.ledger_journaled.KEPT_BYTES", 1)
    submit(ledger, 1, 2)
    ledger.assign_batch([1], 1)
    assert (directory / "journal").stat().st_size > 0
    before = (directory / "journal").stat().st_size
    ledger.sync()
    submit(ledger, 3)
    assert (directory / "journal").stat().st_size < before
    assert seqs(found_in(left_by_a_kill(directory))) == [1, 2, 3]


def test_the_journal_is_bounded_without_any_sync(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.ledger_journaled.MOST_BYTES", 20_000)
    sizes = []
    for seq in range(1, 6 * MOST_PENDING):
        submit(ledger, seq)
        sizes.append((directory / "journal").stat().st_size)
    assert max(sizes) < 100_000
    assert len(found_in(left_by_a_kill(directory)).groups) == 6 * MOST_PENDING - 1


def test_other_writes_come_after_the_submissions_before_them(ledger, directory):
    submit(ledger, 1)
    with ledger.transaction():
        ledger.assign_batch([1], 4)
        submit(ledger, 2)
    assert [(group.seq, group.batch) for group in found_in(left_by_a_kill(directory)).groups] == [(1, 4), (2, 0)]


def test_an_append_that_the_disk_refuses_leaves_nothing(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")
    journal.append(b"kept")

    def write_half(descriptor, data, write=os.write):
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr("os.write", write_half)
    with pytest.raises(StoreUnavailable, match="free space"):
        journal.append(b"refused")
    monkeypatch.undo()
    journal.append(b"kept too")
    assert journal.read() == [b"kept", b"kept too"]
    journal.close()
