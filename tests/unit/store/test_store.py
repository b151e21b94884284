"""The durable store: written data is there after a restart, torn data is not, and full disks are reported."""

import os
import shutil
import sqlite3
from contextlib import closing

import pytest

from atropos_api.errors import DataDirectoryInUse, StoreDamaged, StoreUnavailable
from atropos_api.store.base import Answers, BodyRef, GroupRow, KeyRow, PolicyRow
from atropos_api.store.directory import open_directory
from atropos_api.store.factory import open_store
from atropos_api.store.segments import SegmentLog
from atropos_api.store.sqlite_ledger import SqliteLedger


def make_row(seq, body, **changes):
    values = {
        "seq": seq, "run_id": "", "env_id": None, "size": 4, "token_count": 40, "body": body,
        "received_version": None, "oldest_version": 2, "arrived_at": 1.5,
    }  # fmt: skip
    return GroupRow(**(values | changes))


def test_bodies_come_back_byte_for_byte(tmp_path):
    log = SegmentLog(tmp_path)
    bodies = [b"a", b"", os.urandom(100_000), b"z" * 1000]
    refs = log.append(bodies)
    assert log.read(refs) == bodies
    log.close()
    again = SegmentLog(tmp_path)
    assert again.adopt(refs) == []
    assert again.read(refs) == bodies
    again.close()


def test_more_bodies_than_one_system_call_takes(tmp_path):
    log = SegmentLog(tmp_path)
    bodies = [b"%d" % n for n in range(3000)]
    assert log.read(log.append(bodies)) == bodies
    log.close()


def test_a_torn_tail_costs_only_what_it_tore(tmp_path):
    log = SegmentLog(tmp_path)
    refs = log.append([b"x" * 500, b"y" * 500])
    log.close()
    path = next(tmp_path.glob("*.log"))
    os.truncate(path, path.stat().st_size - 100)
    again = SegmentLog(tmp_path)
    assert again.adopt(refs) == [refs[1]]
    assert again.read(refs[:1]) == [b"x" * 500]
    again.close()


def written(directory, *, synced):
    """Write six segments of a body each, of which the first `synced` are forced to the disk."""
    log = SegmentLog(directory, segment_bytes=1, syncs=True)
    assert log.adopt([]) == []
    refs = []
    for number in range(6):
        refs += log.append([b"%d" % number * 500])
        if number == synced:
            log.sync()
    log.close()
    return refs


def damage(directory, ref):
    with (directory / f"{ref.segment:010d}.log").open("r+b") as file:
        file.seek(ref.offset + 9)
        file.write(b"\0\0\0")


@pytest.mark.parametrize("hit", range(6))
def test_whatever_was_not_forced_to_the_disk_is_looked_at_whole_at_the_start(tmp_path, hit):
    """More than two segments may be written between a sync and a power failure."""
    refs = written(tmp_path, synced=2)
    damage(tmp_path, refs[hit])
    again = SegmentLog(tmp_path, syncs=True)
    # Synced data is not read completely at each start; it is checked when it is read.
    assert again.adopt(refs) == ([refs[hit]] if hit >= 2 else [])
    if hit < 2:
        with pytest.raises(StoreDamaged):
            again.read([refs[hit]])
    again.close()


@pytest.mark.parametrize("mark", ["", "none", "-"])
def test_where_nothing_says_what_was_forced_all_is_looked_at(tmp_path, mark):
    refs = written(tmp_path, synced=5)
    assert (tmp_path / "forced").read_text() == "5"
    (tmp_path / "forced").write_text(mark) if mark != "-" else (tmp_path / "forced").unlink()
    damage(tmp_path, refs[0])
    again = SegmentLog(tmp_path, syncs=True)
    assert again.adopt(refs) == [refs[0]]
    again.close()


def test_what_replaces_forced_segments_that_were_deleted_is_not_called_forced(tmp_path):
    written(tmp_path, synced=5)
    emptied = SegmentLog(tmp_path, syncs=True)
    assert emptied.adopt([]) == []
    emptied.sync()
    emptied.sweep(emptied.removable())
    emptied.close()
    assert not list(tmp_path.glob("*.log"))
    log = SegmentLog(tmp_path, syncs=True)
    refs = log.append([b"new" * 200])
    log.close()
    damage(tmp_path, refs[0])
    again = SegmentLog(tmp_path, syncs=True)
    assert again.adopt(refs) == refs
    again.close()


def test_what_was_never_looked_at_is_not_called_forced(tmp_path):
    refs = written(tmp_path, synced=-1)
    damage(tmp_path, refs[0])
    hasty = SegmentLog(tmp_path, syncs=True)
    hasty.append([b"new"])
    hasty.sync()
    hasty.close()
    again = SegmentLog(tmp_path, syncs=True)
    assert again.adopt(refs) == [refs[0]]
    again.close()


def test_a_changed_byte_is_noticed(tmp_path):
    log = SegmentLog(tmp_path)
    (ref,) = log.append([b"x" * 500])
    with next(tmp_path.glob("*.log")).open("r+b") as file:
        file.seek(ref.offset + 10)
        file.write(b"!")
    with pytest.raises(StoreDamaged, match="checksum"):
        log.read([ref])
    log.close()


def test_a_segment_goes_when_nothing_in_it_is_alive(tmp_path):
    log = SegmentLog(tmp_path, segment_bytes=1000)
    refs = [ref for _ in range(6) for ref in log.append([b"x" * 600])]
    assert len(list(tmp_path.glob("*.log"))) == 3
    log.discard(refs[:4])
    assert len(list(tmp_path.glob("*.log"))) == 1
    assert log.read(refs[4:]) == [b"x" * 600] * 2
    log.close()


def test_a_body_is_safe_once_a_sync_has_covered_it(tmp_path):
    """Rows point to copies of bodies only once these survive a loss of power."""
    log = SegmentLog(tmp_path, segment_bytes=1000, syncs=True)
    first = log.append([b"x" * 600])
    assert not log.is_safe(first)
    log.sync()
    second = log.append([b"x" * 600])
    assert log.is_safe(first)
    assert not log.is_safe(second)
    log.close()


def test_the_file_of_a_dead_segment_stays_until_bodies_and_ledger_were_synced(tmp_path):
    """Rows that a loss of power restores then find their bodies."""
    log = SegmentLog(tmp_path, segment_bytes=1000, syncs=True)
    refs = [ref for _ in range(4) for ref in log.append([b"x" * 600])]
    (first, _) = sorted(tmp_path.glob("*.log"))
    log.discard(refs[:2])
    log.sweep(log.removable())
    assert first.exists()
    log.sync()
    assert first.exists()
    log.sweep(log.removable())
    assert not first.exists()
    log.close()


def test_a_segment_that_dies_while_the_ledger_is_synced_stays_until_the_next_sync(tmp_path, monkeypatch):
    """Two threads may sync at once; the ledger's sync that is under way does not cover the row's end."""
    ledger, log = open_directory(tmp_path, fsync="always", fresh=False)
    log._segment_bytes = 1000
    refs = [ref for _ in range(4) for ref in log.append([b"x" * 600])]
    first = min(tmp_path.rglob("*.log"))

    def meanwhile(_):
        log.discard(refs[:2])
        log.sync()

    with monkeypatch.context() as patch:
        patch.setattr(SqliteLedger, "sync", meanwhile)
        ledger.sync()
    assert first.exists()
    ledger.sync()
    assert not first.exists()
    log.close()
    ledger.close()


def test_mostly_dead_segments_are_named_for_rewriting(tmp_path):
    log = SegmentLog(tmp_path, segment_bytes=1000)
    refs = [ref for _ in range(12) for ref in log.append([b"x" * 200])]
    log.discard(refs[1:5])
    assert log.sparse_segments() == [refs[0].segment]
    log.close()


def test_a_refused_write_leaves_nothing_behind(tmp_path, monkeypatch):
    log = SegmentLog(tmp_path)
    (kept,) = log.append([b"kept"])

    def write_some(descriptor, pieces):
        return os.write(descriptor, b"".join(pieces)[:5])

    monkeypatch.setattr(os, "writev", write_some)
    with pytest.raises(StoreUnavailable, match="free space"):
        log.append([b"x" * 100])
    monkeypatch.undo()
    (after,) = log.append([b"after"])
    assert after.segment == kept.segment, "a segment with half a record at its end would be left"
    assert log.read([kept, after]) == [b"kept", b"after"]
    log.close()


def test_rows_come_back_as_they_were(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    rows = [make_row(1, BodyRef(1, 12, 5)), make_row(2, BodyRef(1, 40, 5), run_id="r", env_id=-3, batch=2, key_id=1)]
    rows.append(make_row(3, BodyRef(1, 80, 9), form="columns"))
    key = KeyRow(key_id=1, owner="env", key="k", group_count=1, used_at=2.0)
    policy = PolicyRow(run_id="r", version=3, step=1, published_at=0.5, orphaned=True)
    with ledger.transaction():
        ledger.add_groups(rows)
        ledger.put_answers(Answers([1], [(b"print", 2), (b"gone", 0)]))
        ledger.put_key(key)
        ledger.put_policy(policy)
    ledger.close()
    found = SqliteLedger(tmp_path / "ledger.sqlite").load()
    assert (found.groups, found.keys, found.policies) == (rows, [key], [policy])
    assert (found.next_seq, found.unanswered, found.expected) == (4, [3], {b"print": 2})


def test_a_directory_of_an_older_schema_opens_with_its_groups(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger(path)
    rows = [make_row(seq, BodyRef(1, 12, 5), key_id=key_id) for seq, key_id in ((1, 0), (2, 7), (3, 0))]
    ledger.add_groups(rows)
    ledger.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE unanswered; DROP TABLE expected; ALTER TABLE places ADD COLUMN answered_seq INTEGER DEFAULT 1;"
            "ALTER TABLE groups DROP COLUMN policy; ALTER TABLE groups DROP COLUMN form; PRAGMA user_version = 1;"
        )
    for _ in range(2):
        again = SqliteLedger(path)
        found = again.load()
        assert (found.groups, found.unanswered) == (rows, [3])
        again.close()


def test_a_transaction_that_fails_keeps_nothing(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")

    def add_and_fail():
        with ledger.transaction():
            ledger.add_groups([make_row(1, BodyRef(1, 12, 5))])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        add_and_fail()
    assert ledger.load().groups == []
    ledger.close()


def test_a_full_disk_is_said_to_be_one(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    ledger._db.execute("PRAGMA max_page_count = 20")

    def fill():
        for seq in range(1, 5000):
            ledger.put_key(KeyRow(key_id=seq, owner="o" * 500, key=str(seq), group_count=1, used_at=0.0))

    with pytest.raises(StoreUnavailable, match="full"):
        fill()
    ledger.close()


def test_one_broker_holds_a_directory_at_a_time(tmp_path):
    ledger, bodies = open_directory(tmp_path, fsync="interval", fresh=False)
    with pytest.raises(DataDirectoryInUse, match=f"pid {os.getpid()}"):
        open_store(str(tmp_path))
    bodies.close()
    ledger.close()
    for part in reversed(open_store(str(tmp_path))):
        part.close()


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_fresh_deletes_what_was_there(tmp_path, end):
    ledger, bodies = open_store(str(tmp_path / "closed"))
    ledger.add_groups([make_row(1, *bodies.append([b"old"]))])
    (tmp_path / "closed" / "notes.txt").write_text("not ours")
    shutil.copytree(tmp_path / "closed", tmp_path / "killed")
    bodies.close()
    ledger.close()
    ledger, bodies = open_store(str(tmp_path / end), fresh=True)
    assert ledger.load().groups == []
    assert (tmp_path / end / "notes.txt").exists()
    bodies.close()
    ledger.close()


def test_the_files_of_a_directory_that_others_may_read_are_its_owners_alone(tmp_path):
    tmp_path.chmod(0o755)
    for part in reversed(open_store(str(tmp_path))):
        part.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}, files


def test_a_new_directory_is_its_owners_alone(tmp_path):
    for part in reversed(open_store(str(tmp_path / "store"))):
        part.close()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_another_schema_is_refused_by_name(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    ledger._db.execute("PRAGMA user_version = 99")
    ledger.close()
    with pytest.raises(StoreDamaged, match="schema 99"):
        SqliteLedger(tmp_path / "ledger.sqlite")
