"""The lock of a run directory: one launcher at a time works in it, and the kernel frees it when that launcher ends.

Two launchers in one directory would mix their metrics and replace each other's checkpoints. The lock is one of the
kernel's on an open file, so a launcher that is killed leaves none behind; the file stays, and holds the number of the
process that had it last.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from example_trainer.launcher.run_dir import RunDirectoryInUse, reporting_flag

LOCK_NAME = "launcher.lock"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of the run directory `root`; raise `RunDirectoryInUse`, with its pid, while another launcher does.

    If the file system has no locks, the run goes on without one.
    """
    with reporting_flag(root, "--run-dir"):
        descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, root)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "its process is just starting"
        raise RunDirectoryInUse(
            f"--run-dir {root}: another launcher works there ({holder}); wait for its end, or name another directory"
        ) from None
    except OSError:
        return
    with reporting_flag(root, "--run-dir"):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
