"""Submissions that are in the journal alone are as safe as those in the database, and never count twice."""

import contextlib
import os
import shutil

import pytest

from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import Answers, BodyRef, EnvironmentRow, Event, GroupRow, KeyRow, PolicyRow
from atropos_api.store.journal import Journal
from atropos_api.store.journaled_ledger import MOST_PENDING, JournaledLedger


def make_row(seq, **changes):
    values = {
        "seq": seq, "run_id": "", "env_id": 3, "size": 4, "token_count": 40, "body": BodyRef(1, 12 * seq, 5),
        "received_version": None, "oldest_version": 2, "arrived_at": 1.5,
    }  # fmt: skip
    return GroupRow(**(values | changes))


ENVIRONMENT = EnvironmentRow(
    environment_id=0, name="e", display_name="e", group_size=4, max_token_length=9, weight=1.0,
    min_batch_allocation=None, max_batches_offpolicy=3, connected=True, registered_at=1.0, seen_at=2.0,
)  # fmt: skip


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
        ledger.add_submission([make_row(seq, key_id=seq)], make_key(seq))


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
    assert found.next_seq == 4


def test_what_is_unanswered_is_found_after_a_kill_whether_the_database_has_it_or_the_journal(ledger, directory):
    """R9: known one by one; not up to a number, which those that come later would move."""
    ledger.add_groups([make_row(1), make_row(2), make_row(3)])
    ledger.put_answers(Answers([3], [(b"early", 1), (b"late", 1)]))
    ledger.probe()
    # From here on in the journal alone.
    ledger.add_groups([make_row(4)], answers=Answers([1], [(b"early", 0), (b"new", 2)]))
    ledger.add_groups([make_row(5)], answers=Answers([4]))
    assert (ledger.load().unanswered, ledger.load().expected) == ([2, 5], {b"late": 1, b"new": 2})
    found = found_in(left_by_a_kill(directory))
    assert (found.unanswered, found.expected) == ([2, 5], {b"late": 1, b"new": 2})


def test_what_is_pending_is_read_again_though_the_database_takes_nothing(ledger):
    submit(ledger, 1, 2)
    ledger.assign_batch([1], 1)
    submit(ledger, 3)
    ledger._db.execute("PRAGMA query_only = ON")
    snapshot = ledger.load()
    ledger._db.execute("PRAGMA query_only = OFF")
    assert [(group.seq, group.batch) for group in snapshot.groups] == [(1, 1), (2, 0), (3, 0)]
    assert snapshot.keys == [make_key(seq) for seq in (1, 2, 3)]
    assert snapshot.next_seq == 4
    assert ledger.load() == snapshot


def test_what_is_gone_is_not_read_again_though_the_database_cannot_be_told(ledger):
    submit(ledger, 1, 2)
    ledger.probe()
    ledger.drop_groups([1])
    ledger.forget_keys([2])
    ledger._db.execute("PRAGMA query_only = ON")
    snapshot = ledger.load()
    ledger._db.execute("PRAGMA query_only = OFF")
    assert (seqs(snapshot), [key.key_id for key in snapshot.keys]) == ([2], [1])


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


def test_a_record_that_the_power_left_without_its_bytes_is_nothing(ledger, directory):
    """A file may have its length and hold something else there."""
    submit(ledger, 1, 2)
    whole = (directory / "journal").stat().st_size
    submit(ledger, 3)
    for filling in (b"\0", b"x"):
        copy = left_by_a_kill(directory, filling.hex())
        with (copy / "journal").open("r+b") as file:
            file.seek(-8, 2)
            file.write(filling * 8)
        assert (copy / "journal").stat().st_size > whole
        assert seqs(found_in(copy)) == [1, 2]


def test_a_kill_between_the_database_and_the_emptying_of_the_journal_repeats_nothing(ledger, directory):
    submit(ledger, 1, 2)
    ledger.drop_groups([1])
    ledger.assign_batch([2], 7)
    submit(ledger, 3)
    ledger.probe()  # takes all of them to the database
    assert (directory / "journal").stat().st_size > 0
    found = found_in(left_by_a_kill(directory))
    assert [(group.seq, group.batch) for group in found.groups] == [(2, 7), (3, 0)]


def test_a_dropped_group_stays_dropped_though_the_journal_still_has_it(ledger, directory):
    submit(ledger, 1, 2)
    ledger.probe()
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


def journal_bytes(directory):
    return sum(path.stat().st_size for path in directory.glob("journal*"))


def test_records_leave_the_journal_once_the_database_is_safe(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_PENDING", 4)
    sizes = []
    for seq in range(1, 30):
        submit(ledger, seq)
        sizes.append(journal_bytes(directory))
    # No sync: what the power might take back from the database stays in the journal.
    assert sizes == sorted(sizes)
    ledger.sync()
    for seq in range(30, 60):
        submit(ledger, seq)
        ledger.sync()
        sizes.append(journal_bytes(directory))
    assert max(sizes[35:]) < sizes[28] / 3
    assert seqs(found_in(left_by_a_kill(directory))) == list(range(1, 60))


def test_the_journal_is_bounded_without_any_sync(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_BYTES", 20_000)
    sizes = []
    for seq in range(1, 6 * MOST_PENDING):
        submit(ledger, seq)
        sizes.append(journal_bytes(directory))
    assert max(sizes) < 100_000
    assert len(found_in(left_by_a_kill(directory)).groups) == 6 * MOST_PENDING - 1


def test_a_full_journal_is_emptied_only_once_the_database_is_on_the_disk(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_BYTES", 1000)
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_PENDING", 4)
    wal = directory / "ledger.sqlite-wal"
    forced, left = {}, []
    force, truncate = os.fdatasync, os.ftruncate

    def note_forced(descriptor):
        force(descriptor)
        forced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def note_emptied(descriptor, size):
        truncate(descriptor, size)
        left.append(wal.stat().st_size - forced.get(wal.stat().st_ino, 0))

    monkeypatch.setattr(os, "fdatasync", note_forced)
    monkeypatch.setattr(os, "ftruncate", note_emptied)
    submit(ledger, *range(1, 40))
    assert left
    assert set(left) == {0}


def test_writes_of_every_kind_are_found_after_a_kill_and_when_the_database_has_them(ledger, directory):
    submit(ledger, 1, 2, 3)
    with ledger.transaction():
        ledger.put_policy(PolicyRow(run_id="r", version=3, step=1, published_at=0.5))
        ledger.put_environment(ENVIRONMENT)
        ledger.assign_batch([1, 2], 1)
        ledger.drop_groups([1])
        ledger.forget_keys([1])
        ledger.add_event(Event(id=5, type="x", time=1.0, data={"a": 1}))
    assert [number for (number,) in ledger._db.execute("SELECT count(*) FROM groups")] == [0]
    found = found_in(left_by_a_kill(directory))
    assert [(group.seq, group.batch) for group in found.groups] == [(2, 1), (3, 0)]
    assert [key.key_id for key in found.keys] == [2, 3]
    assert (found.environments, [event.id for event in found.events]) == ([ENVIRONMENT], [5])
    assert [policy.version for policy in found.policies] == [3]
    assert found == ledger.load()
    ledger.adopt_groups("r")
    assert [number for (number,) in ledger._db.execute("SELECT count(*) FROM groups")] == [2]
    found = found_in(left_by_a_kill(directory, "after"))
    assert [(group.seq, group.run_id, group.batch) for group in found.groups] == [(2, "r", 1), (3, "r", 0)]


def test_a_transaction_of_which_the_database_alone_can_make_a_part_is_whole_or_nothing(ledger):
    submit(ledger, 1)
    with contextlib.suppress(RuntimeError), ledger.transaction():
        ledger.adopt_groups("r")
        ledger.drop_groups([1])
        raise RuntimeError
    assert [(group.seq, group.run_id) for group in ledger.load().groups] == [(1, "")]
    with ledger.transaction():
        ledger.add_groups([make_row(2)])
        ledger.adopt_groups("r")
        ledger.add_groups([make_row(3)])
        ledger.drop_groups([1])
    assert [(group.seq, group.run_id) for group in ledger.load().groups] == [(2, "r"), (3, "")]


def test_a_database_that_takes_nothing_costs_nothing_that_was_kept(ledger, directory, monkeypatch):
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_PENDING", 4)
    ledger._db.execute("PRAGMA query_only = ON")
    submit(ledger, 1, 2)
    with pytest.raises(StoreUnavailable):
        submit(ledger, 3)
    assert seqs(ledger.load()) == seqs(found_in(left_by_a_kill(directory))) == [1, 2]
    ledger._db.execute("PRAGMA query_only = OFF")
    submit(ledger, 3)
    assert seqs(ledger.load()) == seqs(found_in(left_by_a_kill(directory, "later"))) == [1, 2, 3]


def test_the_write_that_makes_it_many_takes_them_to_the_database_so_that_no_batch_has_to(ledger, monkeypatch):
    monkeypatch.setattr("atropos_api.store.journaled_ledger.MOST_PENDING", 4)
    submit(ledger, 1, 2)
    assert ledger._db.execute("SELECT count(*) FROM groups").fetchone() == (2,)


def test_a_journal_of_another_release_is_not_guessed_at(directory):
    journal = Journal(directory / "journal")
    journal.append(b"\x93\x00\x90\xc0")
    journal.close()
    with pytest.raises(StoreDamaged, match="another release"):
        JournaledLedger(directory / "ledger.sqlite")


def test_other_writes_come_after_the_submissions_before_them(ledger, directory):
    submit(ledger, 1)
    with ledger.transaction():
        ledger.assign_batch([1], 4)
        ledger.probe()  # only the database can make this part
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
