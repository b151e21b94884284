"""A call that the system refuses for a while (open files, a deletion) costs no group, and ends no sync for good."""

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from atropos_api.broker import Broker
from atropos_api.errors import StoreUnavailable
from atropos_api.store.directory import open_directory
from atropos_api.store.segments import SegmentLog
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields

TOO_MANY_FILES = OSError(errno.EMFILE, "Too many open files")


def refuse(error):
    def call(*_, **__):
        raise error

    return call


def opened(place, **options):
    return Broker(*open_directory(place, fsync="interval", fresh=False), **options)


def with_one_group(broker):
    request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
    environment = broker.register_environment(request).environment_id
    broker.begin_run(RunRequest(name="run", batch_size=4, max_token_length=9, num_steps=0))
    broker.submit(environment, [check_group(decode_fields(msgspec.json.encode(make_group(4))), env_id=environment)])


def wait_until(done, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_too_many_open_files_make_no_group_a_damaged_one(tmp_path, monkeypatch):
    broker = opened(tmp_path)
    with_one_group(broker)
    broker.close()
    broker = opened(tmp_path)
    broker.state.bodies._readers.clear()  # the check at the start has opened the segment of the process before
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse(TOO_MANY_FILES))
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            broker.read_bodies(broker.get_batch(1))
    assert len(broker.read_bodies(broker.get_batch(1))) == 1
    assert broker.state.counters.groups_lost_total == 0
    broker.close()


def test_the_store_is_forced_to_the_disk_again_once_files_can_be_opened(tmp_path, monkeypatch):
    """The syncing thread must survive, and not wait for the next write: there may be none before the power fails."""
    broker = opened(tmp_path)
    refused, synced = [], []
    duplicate, force = os.dup, os.fdatasync

    def refuse_first(descriptor):
        if not refused:
            refused.append(descriptor)
            raise TOO_MANY_FILES
        return duplicate(descriptor)

    def note(descriptor):
        force(descriptor)
        if refused:
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "dup", refuse_first)
    monkeypatch.setattr(os, "fdatasync", note)
    with_one_group(broker)
    wait_until(lambda: {Path(path).suffix for path in synced} == {".log", ".sqlite-wal"})
    broker.close()


def test_a_sync_that_ran_out_of_files_refuses_no_write_after_it(tmp_path, monkeypatch):
    broker = opened(tmp_path)
    with_one_group(broker)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse(TOO_MANY_FILES))
        with pytest.raises(StoreUnavailable, match="ulimit -n"):
            broker.sync()
    broker.sync()
    with_one_group(broker)
    broker.close()


def test_a_sync_after_one_that_lost_data_fails_too(tmp_path, monkeypatch):
    """It would succeed without that data, which would then count as safe."""
    broker = opened(tmp_path)
    with_one_group(broker)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(StoreUnavailable, match="restart the broker"):
            broker.sync()
    with pytest.raises(StoreUnavailable, match="restart the broker"):
        broker.sync()
    broker.close()


@pytest.mark.parametrize("syncs", [True, False])
def test_a_dead_segment_that_cannot_be_deleted_fails_nothing(tmp_path, monkeypatch, syncs):
    log = SegmentLog(tmp_path, segment_bytes=1000, syncs=syncs)
    refs = [ref for _ in range(4) for ref in log.append([b"x" * 600])]
    dead = min(tmp_path.glob("*.log"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse(PermissionError(errno.EACCES, "Permission denied")))
        log.discard(refs[:2])
        log.sync()
        log.sweep(log.removable())
    assert dead.exists()
    if syncs:
        log.sweep(log.removable())
        assert not dead.exists()
    log.close()


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free space on its disk"), (errno.EROFS, "check its disk and its owner"), (errno.EMFILE, "ulimit")],
)
def test_a_refused_write_names_the_remedy_for_its_own_cause(tmp_path, monkeypatch, code, remedy):
    log = SegmentLog(tmp_path)
    monkeypatch.setattr(os, "open", refuse(OSError(code, os.strerror(code))))
    with pytest.raises(StoreUnavailable, match=f"{os.strerror(code)}.*{remedy}"):
        log.append([b"body"])
