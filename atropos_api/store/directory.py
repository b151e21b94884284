"""The store in a directory: SQLite's ledger and the segments of bodies, under a lock, forced to the disk in that order.

A directory is used by one broker at a time, which holds a lock on it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from atropos_api.common.files import sync_path
from atropos_api.errors import DataDirectoryInUse, StoreUnavailable, StoreUnusable
from atropos_api.store.failpoints import Failpoint, Reach, ignore_failpoint
from atropos_api.store.segments import SegmentLog
from atropos_api.store.sqlite_ledger import SqliteLedger

logger = logging.getLogger(__name__)

Fsync = Literal["always", "interval", "never"]

SYNC_INTERVAL_SECONDS = 1.0
MOST_SHOWN = 200
"""Longest part of a path, in characters, that a message shows."""


class DirectoryLock:
    """An advisory lock that is released when the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = path.read_text(encoding="utf-8").strip() or "unknown"
            os.close(self._descriptor)
            raise DataDirectoryInUse(
                f"{directory} is in use by another broker (pid {owner}); stop it or choose another --store"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


class PeriodicSync:
    """A thread that forces the store to the disk one second after a write, and sleeps while nothing is written."""

    def __init__(self, ledger: SqliteLedger, bodies: SegmentLog) -> None:
        self._ledger = ledger
        self._bodies = bodies
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-sync", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._ledger.written.set()
        self._thread.join()

    def _run(self) -> None:
        failure = ""
        while True:
            self._ledger.written.wait()
            self._closing.wait(SYNC_INTERVAL_SECONDS)
            self._ledger.written.clear()
            closing = self._closing.is_set()  # read after `clear`, which may have undone the `set` of `close`
            try:
                self._bodies.sync()
                self._ledger.sync()
                failure = ""
            except StoreUnavailable as error:
                if str(error) != failure:
                    logger.exception("the store could not be forced to the disk; a power failure now would lose groups")
                failure = str(error)
                self._ledger.written.set()  # try again even if nothing more is written: it is not on the disk yet
            if closing:
                return


class DurableLedger(SqliteLedger):
    """The ledger of a directory; closing it releases the directory's lock."""

    def __init__(
        self, directory: Path, bodies: SegmentLog, *, fsync: Fsync, lock: DirectoryLock, reach: Reach = ignore_failpoint
    ) -> None:
        synchronous = "OFF" if fsync == "never" else "NORMAL"
        path = directory / "ledger.sqlite"
        with suppress(OSError):  # SQLite reports what is wrong with the path, and gives its other files this one's mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        super().__init__(path, synchronous=synchronous)
        self._bodies = bodies
        self._lock = lock
        self._reach = reach
        if fsync != "never":
            # The write-ahead log may have been created just now, and its directory entry must survive too.
            self.probe()
            sync_path(directory)
        self._periodic = PeriodicSync(self, bodies) if fsync == "interval" else None

    def sync(self) -> None:
        """Force the rows to the disk, after the bodies they point at; then delete segments without live bodies."""
        removable = self._bodies.removable()  # before the sync, which does not cover those added meanwhile
        try:
            super().sync()
        except OSError as error:
            raise self._bodies.note_failed_sync(error) from error
        self._reach(Failpoint.LEDGER_SYNCED)
        self._bodies.sweep(removable)

    def close(self) -> None:
        if self._periodic is not None:
            self._periodic.close()
        super().close()
        self._lock.release()


def open_directory(
    directory: Path, *, fsync: Fsync, fresh: bool, reach: Reach = ignore_failpoint
) -> tuple[DurableLedger, SegmentLog]:
    """Lock the directory (created if need be) and open its store; `fresh` deletes its contents first."""
    try:
        return _open(directory, fsync=fsync, fresh=fresh, reach=reach)
    except OSError as error:
        place = f" ({error.filename})" if error.filename not in {None, str(directory)} else ""
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise StoreUnusable(
            f"--store {str(directory)[:MOST_SHOWN]}: {reason}{place[:MOST_SHOWN]}; name a directory that this user can "
            "write to, on a disk with room"
        ) from error


def _open(directory: Path, *, fsync: Fsync, fresh: bool, reach: Reach) -> tuple[DurableLedger, SegmentLog]:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = DirectoryLock(directory)
    try:
        if fresh:
            _delete_contents(directory)
        bodies = SegmentLog(directory / "segments", syncs=fsync != "never", reach=reach)
        return DurableLedger(directory, bodies, fsync=fsync, lock=lock, reach=reach), bodies
    except BaseException:
        lock.release()
        raise


def _delete_contents(directory: Path) -> None:
    """Delete only the files that this module makes, because the directory may hold others."""
    shutil.rmtree(directory / "segments", ignore_errors=True)
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (directory / name).unlink(missing_ok=True)
