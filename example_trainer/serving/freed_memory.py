"""What a dropped adapter leaves behind goes back to the system.

glibc keeps freed memory between things that stay, and takes new memory for what does not fit there: over hundreds of
adapters a process grows by some tens of MiB in which nothing lies.
"""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give back what is free; about a millisecond. Without glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
