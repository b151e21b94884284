"""Removes what killed processes leave behind: POSIX shared memory and temporary files.

A file in /dev/shm is removed only if it appeared during the run, a process of the run had it mapped, and no process
has it mapped now. Temporary files need no such check, since children have a temporary directory of their own.

`Guardian` starts a small process that cleans up if the launcher is killed. The launcher holds the other end of its
standard input and writes one JSON object a line: the mark of the run's processes, its temporary directory, and the
shared memory its processes map. When the pipe closes without `{"done": true}`, the launcher was killed: the guardian
ends all processes with the mark and removes what they left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from example_trainer.processes.tree import end_processes, find_tree, python_path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own place for it


@dataclass(slots=True)
class _Sighting:
    """A new file that no process of the run has mapped so far."""

    seen_at: float
    looked_at: float = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if the last look was a tenth of its age ago or more: its owner is most likely to map it early."""
        return now - self.looked_at >= (now - self.seen_at) / 10


class SharedMemoryLedger:
    """Records which files in /dev/shm the run's processes have mapped, while those processes can still be inspected."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._foreign = self._listing()
        self._owned: set[str] = set()
        self._undecided: dict[str, _Sighting] = {}

    def observe(self, processes: Iterable[psutil.Process]) -> frozenset[str]:
        """Record which new files `processes` have mapped; return those recorded by this call.

        Mappings are read only for files of unknown owner, and for those less and less often: an idle run costs one
        listing of a directory, so this may be called many times a second.
        """
        now = time.monotonic()
        undecided = self._listing() - self._foreign - self._owned
        self._undecided = {name: self._undecided.get(name) or _Sighting(now) for name in undecided}
        due = [sighting for sighting in self._undecided.values() if sighting.is_due(now)]
        if not due:
            return frozenset()
        mapped = set().union(*(mapped_files(process.pid, self._root) for process in processes))
        for sighting in due:
            sighting.looked_at = now
        fresh = frozenset(undecided & mapped)
        self._owned |= fresh
        return fresh

    def sweep(self) -> list[str]:
        """Remove the files that the run's processes had mapped and no process has mapped now; return their names."""
        return sweep(self._owned, self._root)

    def _listing(self) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self._root) if entry.is_file(follow_symlinks=False)}
        except OSError:
            return set()


def sweep(names: Iterable[str], root: Path = SHARED_MEMORY) -> list[str]:
    """Remove the files `names` of `root` that no running process has mapped; return their names."""
    present = {name for name in names if (root / name).exists()}
    if not present:
        return []
    in_use = set().union(*(mapped_files(pid, root) for pid in psutil.pids()))
    removed = sorted(present - in_use)
    for name in removed:
        with contextlib.suppress(OSError):
            (root / name).unlink()
    return removed


def mapped_files(pid: int, root: Path = SHARED_MEMORY) -> set[str]:
    """Return the names of the files of `root` that the process has mapped."""
    prefix = f"{root}/"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if prefix in line)
    return {path.removeprefix(prefix).removesuffix(" (deleted)") for path in paths if path.startswith(prefix)}


GRACE_SECONDS = 3.0
_DETACH = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"


class Guardian:
    """The launcher's side: starts the guardian process and sends it what to clean up."""

    def __init__(self, *, mark: str, temporary_dir: str, detached: bool = False) -> None:
        """`detached` is for a launcher whose own starter kills its child processes: the guardian is then not one."""
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DETACH, *command] if detached else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        if detached:
            self._process.wait()  # it exits at once, and its child, the guardian, is no child of this process
        self._write({"mark": mark, "temporary_dir": temporary_dir})

    @property
    def pid(self) -> int:
        return self._process.pid

    def note_shared_memory(self, names: Iterable[str]) -> None:
        self._write({"shared_memory": sorted(names)})

    def dismiss(self) -> None:
        """Make the guardian exit without doing anything, because everything is cleaned up."""
        self._write({"done": True})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # on a machine that swaps: everything is cleaned up, so it has nothing to do
            self._process.kill()
            self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except OSError:
            # The guardian has exited; the launcher still ends its children itself.
            return


def keep_watch(pipe: IO[str]) -> int:
    """Read the launcher's messages until it exits; then clean up, unless the message `done` arrived."""
    mark, temporary_dir = "", ""
    shared_memory: set[str] = set()
    for line in pipe:
        message = json.loads(line)
        if message.get("done"):
            return 0
        mark = message.get("mark", mark)
        temporary_dir = message.get("temporary_dir", temporary_dir)
        shared_memory.update(message.get("shared_memory", ()))
    if mark:
        # One SIGTERM is enough: no program is left that needs their reports, and on Ray they must end within 10 s.
        end_processes(lambda: find_tree((), mark), grace_seconds=GRACE_SECONDS, asks_twice=False)
        sweep(shared_memory)
        shutil.rmtree(temporary_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    os.chdir("/")
    sys.exit(keep_watch(sys.stdin))
