"""Garbage collection for a server whose objects are mostly long lists of numbers, which hold no cycles."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000  # more than the rollouts in flight hold, which at 700 would be looked through all the time


def collect_rarely() -> None:
    """Never look at what is loaded already again, and at what is new less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)
