"""Control over freed memory: glibc's defaults cost the broker time and let other processes grow.

The broker allocates and frees bodies of some megabytes, hundreds a second. By default glibc gives such blocks back to
the system at once and asks for the same pages again, and clearing them again costs more than all work on the bodies.
`keep_freed_memory` keeps a bounded amount instead; from time to time `Trimmer` returns what a burst left free between
blocks in use. `return_freed_memory` is for dropped adapters: glibc takes new memory for a block that fits into no gap,
so over hundreds of adapters a process would grow by some tens of MiB of unused memory.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 64 * 2**20
MAPPED_FROM_BYTES: Final = 32 * 2**20
"""Blocks of at least this size are mapped separately and returned when freed; glibc accepts no larger threshold."""

GROWN_BYTES: Final = 8 * 2**20
"""Growth by less than this is not worth a trim."""

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Let the allocator keep up to `KEPT_BYTES` of freed memory; return False if the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


class Trimmer:
    """Trimmer of freed memory: `trim` returns it to the system if the process has grown since the last call.

    A trim takes some milliseconds and may run in any thread.
    """

    def __init__(self) -> None:
        self._resident_bytes = 0

    def trim(self) -> None:
        if _resident_bytes() < self._resident_bytes + GROWN_BYTES:
            return
        return_freed_memory()
        self._resident_bytes = _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if the system does not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def return_freed_memory() -> None:
    """Return free memory to the system, in about a millisecond; without glibc nothing happens."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
