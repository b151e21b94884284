"""Garbage collection for a server whose objects are mostly long lists of numbers, which hold no cycles."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000  # Python's own 700 would look through the rollouts in flight many times a second


def collect_rarely() -> None:
    """Never look at what is loaded already again, and at what is new less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
