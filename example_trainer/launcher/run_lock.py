"""The lock of a run's directories: one launcher, or one trainer that was started by hand, works in them at a time.

Two of them would mix their metrics and replace each other's checkpoints. The lock is one of the kernel's on an open
file, so a process that is killed leaves none behind; the file stays, and holds the number of the process that had it
last. A trainer under a launcher takes none: its launcher holds them, also while it starts the trainer again. By the
lock file `refuse_foreign_directory` tells the directory of a run from others.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from example_trainer.launcher.run_dir import RunDir, RunDirectoryInUse, find_checkpoint, reporting_flag
from example_trainer.processes.tree import MARK_VARIABLE

LOCK_NAME = "run.lock"


@contextmanager
def locked(places: Mapping[str, Path | None]) -> Iterator[None]:
    """Hold the locks of directories, given by their flags; None is no directory.

    Raises `RunDirectoryInUse`, with the holder's pid, while another process has one of them. On a file system without
    locks the run goes on unlocked.
    """
    # By their real paths: the kernel would refuse a second lock on one file to its own holder, too.
    directories = {path.resolve(): (flag, path) for flag, path in places.items() if path is not None}
    with ExitStack() as held:
        for flag, path in directories.values():
            held.enter_context(_locked(path, flag))
        yield


def refuse_foreign_directory(run: RunDir) -> None:
    """Raise `RunDirectoryInUse` if the directory holds a `config.json` that is not a run's: the run's would replace it.

    It is then most likely a model. Other files are accepted: a batch script or a shell makes some before the run
    begins, as `> RUN/launch.log` does.
    """
    with reporting_flag(run.root, "--run-dir"):
        is_known = (run.root / LOCK_NAME).exists() or run.metrics.exists() or not run.record.exists()
    if is_known or find_checkpoint(run.root) is not None:
        return
    raise RunDirectoryInUse(
        f"--run-dir {run.root} holds a {run.record.name}, but no run, so it may be a model; name a new directory, or "
        "an empty one"
    )


def started_by_launcher(environ: Mapping[str, str]) -> bool:
    """Return True in a program that a launcher has started."""
    return bool(environ.get(MARK_VARIABLE))


@contextmanager
def _locked(directory: Path, flag: str) -> Iterator[None]:
    with reporting_flag(directory, flag):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, directory, flag)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path, flag: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "its process is just starting"
        raise RunDirectoryInUse(
            f"{flag} {directory}: another run works there ({holder}); wait for its end, or name another directory"
        ) from None
    except OSError:
        return
    with reporting_flag(directory, flag):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
