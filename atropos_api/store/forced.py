"""Up to which segment the bodies are known to lie on the disk: a file of one number beside them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

NAME: Final = "forced"


class ForcedMark:
    """`number` is the last segment that was forced to the disk, with all before it; 0 if none is known to be."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self.number = self._read()

    def note(self, number: int) -> None:
        """All segments up to this one are on the disk now."""
        if number <= self.number:
            return
        partial = self._path.with_suffix(".part")
        try:
            partial.write_text(str(number))
            partial.replace(self._path)
        except OSError as error:
            # Without it the next start reads more than it needs to.
            logger.info("%s: cannot be written (%s)", self._path, error.strerror)
        else:
            self.number = number

    def _read(self) -> int:
        try:
            return int(self._path.read_text())
        except (OSError, ValueError):
            return 0
