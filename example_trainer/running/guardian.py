"""The launcher's last will: a tiny process that cleans up if the launcher is killed and cannot.

The launcher holds the other end of this process's standard input and writes one JSON object a line: the mark of the
run's processes, its temporary directory, and the shared memory its processes map. When the pipe closes without
`{"done": true}`, the launcher has died: what carries the mark is ended and what it left behind is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import IO, Any

from example_trainer.running.interpreter import python_path
from example_trainer.running.leftovers import sweep
from example_trainer.running.process_tree import end_processes, find_tree

GRACE_SECONDS = 3.0


class Guardian:
    """The launcher's side: starts the process and keeps its will up to date."""

    def __init__(self, *, mark: str, temporary_dir: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        self._write({"mark": mark, "temporary_dir": temporary_dir})

    @property
    def pid(self) -> int:
        return self._process.pid

    def note_shared_memory(self, names: Iterable[str]) -> None:
        self._write({"shared_memory": sorted(names)})

    def dismiss(self) -> None:
        """Everything is cleaned up; the guardian ends without doing anything."""
        self._write({"done": True})
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait(timeout=10)

    def _write(self, message: dict[str, Any]) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except OSError:
            # The guardian is gone; the launcher still ends its children itself.
            return


def keep_watch(pipe: IO[str]) -> int:
    """Read the will until the launcher ends; carry it out unless dismissed."""
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
        end_processes(lambda: find_tree((), mark), grace_seconds=GRACE_SECONDS)
        sweep(shared_memory)
        shutil.rmtree(temporary_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    os.chdir("/")
    sys.exit(keep_watch(sys.stdin))
