"""What the C library does with freed memory: the broker's bodies come and go by the megabyte, hundreds a second.

By default glibc gives such blocks back to the system at once and asks for the same pages again, and clearing them anew
costs more than everything that is done with the bodies. Keeping a bounded amount costs that much memory, no more.
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT_BYTES: Final = 64 * 2**20
MAPPED_FROM_BYTES: Final = 32 * 2**20
"""Single blocks from this size on are mapped, and go back whole when freed; glibc takes no larger bound."""

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> bool:
    """Have the allocator keep up to `KEPT_BYTES` of freed memory; False where the C library is another."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
