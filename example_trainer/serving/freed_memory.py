"""What dropped adapters leave behind goes back to the system.

glibc keeps freed memory between things that stay, and takes new memory for what does not fit there: over hundreds of
adapters a process grows by some tens of MiB in which nothing lies.
"""

from __future__ import annotations

import ctypes

_DROPS_PER_TRIM = 16  # a trim takes about a millisecond, in which nothing is decoded


class FreedMemory:
    """Counts the drops in one process, and gives memory back after every few of them."""

    def __init__(self) -> None:
        self._drops = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """Glibc's alone."""

    def note_drop(self) -> None:
        self._drops += 1
        if self._drops % _DROPS_PER_TRIM == 0 and self._trim is not None:
            self._trim(0)
