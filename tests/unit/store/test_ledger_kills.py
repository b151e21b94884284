"""The ledger in SQLite keeps every write through a kill."""

import contextlib
import shutil

import pytest

from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import Answers, BodyRef, EnvironmentRow, Event, GroupRow, KeyRow, PolicyRow
from atropos_api.store.directory import open_directory
from atropos_api.store.sqlite_ledger import SqliteLedger


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
    opened = SqliteLedger(directory / "ledger.sqlite")
    yield opened
    opened.close()


def submit(ledger, *seqs):
    for seq in seqs:
        ledger.add_submission([make_row(seq, key_id=seq)], make_key(seq))


def left_by_a_kill(directory, name="killed"):
    """Copy the current files, which a process finds if its predecessor is killed at this moment."""
    copy = directory.with_name(name)
    shutil.copytree(directory, copy)
    return copy


def found_in(directory):
    ledger, bodies = open_directory(directory, fsync="never", fresh=False)
    snapshot = ledger.load()
    bodies.close()
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


def test_what_is_unanswered_is_found_after_a_kill(ledger, directory):
    """R9: they are recorded one by one, not up to a number, which later ones would move."""
    ledger.add_groups([make_row(1), make_row(2), make_row(3)])
    ledger.put_answers(Answers([3], [(b"early", 1), (b"late", 1)]))
    ledger.add_groups([make_row(4)], answers=Answers([1], [(b"early", 0), (b"new", 2)]))
    ledger.add_groups([make_row(5)], answers=Answers([4]))
    found = found_in(left_by_a_kill(directory))
    assert (found.unanswered, found.expected) == ([2, 5], {b"late": 1, b"new": 2})


def test_a_number_is_not_used_twice_though_its_group_is_gone(ledger, directory):
    submit(ledger, 1, 2, 3)
    ledger.drop_groups([2, 3])
    ledger.drop_groups([1])
    assert found_in(left_by_a_kill(directory)).next_seq == 4


def test_a_transaction_cut_short_is_nothing_and_costs_its_neighbours_nothing(ledger, directory):
    submit(ledger, 1, 2)
    whole = (directory / "ledger.sqlite-wal").stat().st_size
    submit(ledger, 3)
    size = (directory / "ledger.sqlite-wal").stat().st_size
    for cut in range(whole, size, 700):
        copy = left_by_a_kill(directory, f"cut {cut}")
        with (copy / "ledger.sqlite-wal").open("r+b") as file:
            file.truncate(cut)
        assert seqs(found_in(copy)) == [1, 2]


def test_a_transaction_that_the_power_left_without_its_bytes_is_nothing(ledger, directory):
    """A file may have the right length and other content there."""
    submit(ledger, 1, 2)
    submit(ledger, 3)
    for filling in (b"\0", b"x"):
        copy = left_by_a_kill(directory, filling.hex())
        with (copy / "ledger.sqlite-wal").open("r+b") as file:
            file.seek(-8, 2)
            file.write(filling * 8)
        assert seqs(found_in(copy)) == [1, 2]


def test_what_was_synced_survives_a_loss_of_power(ledger, directory):
    submit(ledger, 1, 2)
    ledger.sync()
    before = left_by_a_kill(directory, "before")
    ledger.assign_batch([1], 1)
    assert [group.batch for group in found_in(before).groups] == [0, 0]


def test_writes_of_every_kind_are_found_after_a_kill(ledger, directory):
    submit(ledger, 1, 2, 3)
    with ledger.transaction():
        ledger.put_policy(PolicyRow(run_id="r", version=3, step=1, published_at=0.5))
        ledger.put_environment(ENVIRONMENT)
        ledger.assign_batch([1, 2], 1)
        ledger.drop_groups([1])
        ledger.forget_keys([1])
        ledger.add_event(Event(id=5, type="x", time=1.0, data={"a": 1}))
    found = found_in(left_by_a_kill(directory))
    assert [(group.seq, group.batch) for group in found.groups] == [(2, 1), (3, 0)]
    assert [key.key_id for key in found.keys] == [2, 3]
    assert (found.environments, [event.id for event in found.events]) == ([ENVIRONMENT], [5])
    assert [policy.version for policy in found.policies] == [3]
    assert found == ledger.load()
    ledger.adopt_groups("r")
    found = found_in(left_by_a_kill(directory, "after"))
    assert [(group.seq, group.run_id, group.batch) for group in found.groups] == [(2, "r", 1), (3, "r", 0)]


def test_a_transaction_is_whole_or_nothing(ledger):
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


def test_a_database_that_takes_nothing_costs_nothing_that_was_kept(ledger, directory):
    submit(ledger, 1, 2)
    ledger._db.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable):
        submit(ledger, 3)
    assert seqs(ledger.load()) == seqs(found_in(left_by_a_kill(directory))) == [1, 2]
    ledger._db.execute("PRAGMA query_only = OFF")
    submit(ledger, 3)
    assert seqs(ledger.load()) == seqs(found_in(left_by_a_kill(directory, "later"))) == [1, 2, 3]
