"""The log of a program: for its owner's eyes alone; its last lines, and the one of them that says why it ended."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

SHOWN_LINES = 20
_BYTES_A_LINE = 800
_SAYS_WHY = re.compile(r": error: |\b\w*(Error|Exception): ")


def open_private_log(path: Path) -> BinaryIO:
    """A log to append to, readable by this user alone: programs that are not ours may log what they were given."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def last_lines(path: Path, count: int = SHOWN_LINES) -> list[str]:
    """The end of a log, without what of its first line is not read; nothing if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _BYTES_A_LINE * count))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def reason(lines: Sequence[str]) -> str:
    """The last line that tells of an error, behind a colon; nothing if none does."""
    return next((f": {line.strip()}" for line in reversed(lines) if _SAYS_WHY.search(line)), "")
