"""What the C library does with freed memory: the broker's bodies come and go by the megabyte, hundreds a second.

By default glibc gives such blocks back to the system at once and asks for the same pages again, and clearing them anew
costs more than everything that is done with the bodies. Keeping a bounded amount costs that much memory, no more, and
what a burst left behind is given back now and then, for it lies between blocks that live on.

What a dropped adapter leaves behind goes back to the system.

glibc keeps freed memory between things that stay, and takes new memory for what does not fit there: over hundreds of
adapters a process grows by some tens of MiB in which nothing lies.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 64 * 2**20

MAPPED_FROM_BYTES: Final = 32 * 2**20
"""Single blocks from this size on are mapped, and go back whole when freed; glibc takes no larger bound."""

GROWN_BYTES: Final = 8 * 2**20
"""Less than this is not worth giving back."""

_STATM: Final = Path("/proc/self/statm")

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_TRIM_THRESHOLD: Final = -1

_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Have the allocator keep up to `KEPT_BYTES` of freed memory; False where the C library is another."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


class Trimmer:
    """Gives freed memory back whenever the process has grown since it last did; a few milliseconds, for any thread."""

    def __init__(self) -> None:
        self._resident_bytes = 0

    def trim(self) -> None:
        if _resident_bytes() < self._resident_bytes + GROWN_BYTES:
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError, TypeError):
            return
        self._resident_bytes = _resident_bytes()


def _resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def return_freed_memory() -> None:
    """Give back what is free; about a millisecond. Without glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
