"""A view of a launch that outlives its output: a reader that leaves or sleeps neither ends nor holds the run."""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from atropos_api.common.streams import discard_output
from example_trainer.launcher.progress import QuietView, Snapshot, View


class LastingView:
    """Shows what another view does, when and as long as the output can be written.

    A closed pipe or a full disk ends no run. A pipe that nobody reads, or a terminal that Ctrl-S has stopped, holds
    none: the launcher would restart nothing, and obey no signal, while it waited to write.
    """

    def __init__(self, view: View, out: IO[str] | None = None) -> None:
        self._view = view
        self._out = out or sys.stdout
        self._held: deque[dict[str, Any]] = deque()

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        self._held.extend(rows)
        with self._forgiving(snapshot):
            # A pipe that can be written has room for 4 KiB, which are not many rows.
            while self._can_write():
                self._view.update(snapshot, [self._held.popleft()] if self._held else [])
                if not self._held:
                    break

    def close(self) -> None:
        with self._forgiving():
            if self._can_write():
                self._view.close()

    def _can_write(self) -> bool:
        try:
            return bool(select.select([], [self._out.fileno()], [], 0)[1])
        except ValueError:  # a stream that is no file
            return True

    @contextmanager
    def _forgiving(self, snapshot: Snapshot | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._view = QuietView()
            discard_output(self._out)
            where = "" if snapshot is None else f" in {snapshot.run_dir}"
            with suppress(OSError):
                sys.stderr.write(f"the output cannot be written ({error.strerror}); the run goes on{where}\n")
