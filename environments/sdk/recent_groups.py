"""The newest groups of a run, in a file that stays small: what a model writes now, for people to read.

A run makes more groups than anybody reads, and writing each would cost a busy environment time. So at most ten a second
are kept, fewer where they are long, and of these the newest so many.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atropos_api.common.whole_files import write_whole
from atropos_api.wire.groups import Group

LEAST_INTERVAL_SECONDS = 0.1
# Of the event loop's time: 16 sequences of 4,096 tokens take 30 ms, which ten times a second would be a third of it.
MOST_SHARE_OF_TIME = 0.01
MOST_BYTES = 16 << 20

Chats = list[list[dict[str, Any]]]

logger = logging.getLogger(__name__)


class RecentGroups:
    """JSON lines of at most twice `keep` groups while it is written, and of the newest `keep` once it is closed.

    Long groups are fewer, so that the file has at most twice `most_bytes`. An attempt that goes on with a run goes on
    with its file. A disk that takes no more ends the keeping and nothing else.
    """

    def __init__(
        self, path: Path, keep: int, *, clock: Callable[[], float] = time.monotonic, most_bytes: int = MOST_BYTES
    ) -> None:
        self.path = path
        self._keep = keep
        self._clock = clock
        self._most_bytes = most_bytes
        self._due_at = float("-inf")
        self._lines = self._bytes = 0
        self._file: BinaryIO | None = None

    def offer(self, group: Group, chats: Callable[[], Chats]) -> None:
        """Keep the group with its chats if one is due; it is on its way to the disk when this returns."""
        started = self._clock()
        if started < self._due_at:
            return
        try:
            self._append(msgspec.structs.replace(group, messages=group.messages or chats()))
        except OSError as error:
            logger.warning("%s: groups are no longer kept to be read (%s)", self.path, error.strerror)
            self._due_at = float("inf")
            return
        ended = self._clock()
        self._due_at = max(started + LEAST_INTERVAL_SECONDS, ended + (ended - started) / MOST_SHARE_OF_TIME)

    def close(self) -> None:
        """Leave the newest groups; the next one opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None
            try:
                self._trim()
            except OSError as error:
                logger.warning("%s: the oldest groups are left in it (%s)", self.path, error.strerror)

    def _append(self, group: Group) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._trim()
            self._file = self.path.open("ab")
        line = msgspec.json.encode(group) + b"\n"
        self._file.write(line)
        self._file.flush()
        self._lines, self._bytes = self._lines + 1, self._bytes + len(line)
        if self._lines >= 2 * self._keep or self._bytes >= 2 * self._most_bytes:
            self.close()

    def _trim(self) -> None:
        """Keep the newest whole lines; of a killed writer's last line there may be a part."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            newest = deque((line for line in file if line.endswith(b"\n")), maxlen=self._keep)
        while len(newest) > 1 and sum(map(len, newest)) > self._most_bytes:
            newest.popleft()
        write_whole(self.path, b"".join(newest))
        self._lines, self._bytes = len(newest), sum(map(len, newest))
