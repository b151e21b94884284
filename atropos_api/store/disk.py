"""The disk under the segments: the mark of what it has been forced to keep, and the errors with which it refuses."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Final

from atropos_api.common.files import write_whole
from atropos_api.errors import StoreUnavailable

logger = logging.getLogger(__name__)

MARK_NAME: Final = "forced"
PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Failures that may pass: a full disk, and too many open files, which many connections at once can cause."""


class ForcedMark:
    """A file with the number of the last segment that was forced to the disk along with all before it.

    `number` is 0 if none is known to be.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MARK_NAME
        self.number = self._read()

    def note(self, number: int) -> None:
        """Record that all segments up to this one are on the disk."""
        if number <= self.number:
            return
        try:
            write_whole(self._path, str(number))
        except OSError as error:
            # Without the mark, the next start only reads more than it needs to.
            logger.info("%s: cannot be written (%s)", self._path, error.strerror)
        else:
            self.number = number

    def _read(self) -> int:
        try:
            return int(self._path.read_text())
        except (OSError, ValueError):
            return 0


def unavailable(error: OSError, size: int = 0) -> StoreUnavailable:
    """Return the error for a write that failed whole."""
    return StoreUnavailable(
        f"the store cannot be used ({error.strerror}); {_remedy(error)}, nothing was kept", refused_bytes=size
    )


def not_forced(error: OSError) -> StoreUnavailable:
    """Return the error for a sync that failed but may succeed later; what was written before it stays."""
    return StoreUnavailable(f"the store cannot be forced to its disk ({error.strerror}); {_remedy(error)}")


def _remedy(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "free space on its disk"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "allow more open files (ulimit -n) or fewer connections (--max-connections)"
    return "check its disk and its owner"
