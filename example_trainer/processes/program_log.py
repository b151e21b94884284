"""The log of a program: it is readable by this user only, and its size has a limit.

A program writes to the file itself, so nothing has to run for its lines to be kept, and a program that has just died
has left all of them. Once the file has reached the limit, its content is moved to `NAME.log.1`, whose earlier content
is lost: the newest lines are always kept, up to twice the limit. The last lines of a log, and the one among them that
names an error, explain a failure.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

LARGEST_LOG_BYTES: Final = 256 * 2**20
SHOWN_LINES = 20
_BYTES_A_LINE = 800
_SAYS_WHY = re.compile(r": error: |\b\w*(Error|Exception): ")

logger = logging.getLogger(__name__)


def open_private_log(path: Path) -> BinaryIO:
    """Open a log for appending, readable by this user only: third-party programs may log secrets they were given."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def older_part(path: Path) -> Path:
    """Return the path to which the content of a log that has become too large is moved."""
    return path.with_name(f"{path.name}.1")


def limit_size(path: Path, largest_bytes: int) -> None:
    """Move the content of a log that has reached the limit to its older part; its programs go on writing to it.

    A line that is written between the last read and the truncation, some microseconds, is lost.
    """
    older = older_part(path)
    try:
        size_bytes = path.stat().st_size
        if size_bytes < largest_bytes:
            return
        # First, so that a disk never holds more than twice the limit.
        older.unlink(missing_ok=True)
        if shutil.disk_usage(path.parent).free < size_bytes:
            return  # the part of a copy that still fits would leave the run's programs no room for a checkpoint
        with path.open("r+b", buffering=0) as log, open_private_log(older) as kept:
            shutil.copyfileobj(log, kept)
            # Programs have opened the log for appending, so their next line is its first one.
            os.ftruncate(log.fileno(), 0)
    except OSError as error:  # no log, or a full disk: then the next call tries again
        logger.debug("the size of %s is not limited: %s", path, error)


def last_lines(path: Path, count: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log, its older part included; none if there is no log.

    A first line may be cut at its start.
    """
    lines = _end_of(path, count)
    return lines if len(lines) == count else [*_end_of(older_part(path), count - len(lines)), *lines]


def signal_name(number: int) -> str:
    """Return a signal's name; Python has names for the first and the last real-time signal only."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def reason(lines: Sequence[str]) -> str:
    """Return the last line that reports an error, after a colon; "" if there is none."""
    return next((f": {line.strip()}" for line in reversed(lines) if _SAYS_WHY.search(line)), "")


def _end_of(path: Path, count: int) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _BYTES_A_LINE * count))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
