"""What an operator may set, as the rules see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerSettings:
    """Limits and times; the command line's model documents each."""

    max_staleness: int | None = None
    drop_orphaned: bool = False
    require_versions: bool = False
    max_uncommitted: int = 16
    keep_batches: int = 0
    environment_timeout_seconds: float = 60.0
    min_allocation_wait_seconds: float = 120.0
    dedup_window_seconds: float = 30.0
    key_memory_seconds: float = 3600.0
    max_left_over_bytes: int = 2**30
    max_queued_sequences: int = 200_000
    max_queued_bytes: int = 16 * 2**30
