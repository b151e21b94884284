"""Which environments are alive and what they add up to: counted when somebody comes or goes, not at every question."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from atropos_api.store.base import EnvironmentRow


@dataclass(frozen=True, slots=True)
class Census:
    """True until `until`, unless an environment registers, leaves, or is heard of that was not alive."""

    until: float
    alive: list[EnvironmentRow]
    alive_ids: frozenset[int]
    connected_sizes: frozenset[int]
    """Group sizes of those that did not leave, silent ones among them."""
    largest_size: int
    token_share: float
    """Sum over the alive of `token_share_of`."""
    allocated: float
    """Sum over the alive of the fractions of a batch that are theirs at least."""
    most_batches_offpolicy: int


def take_census(rows: Collection[EnvironmentRow], now: float, timeout_seconds: float) -> Census:
    alive = [row for row in rows if row.connected and now - row.seen_at <= timeout_seconds]
    sizes = frozenset(row.group_size for row in rows if row.connected)
    return Census(
        until=min((row.seen_at for row in alive), default=math.inf) + timeout_seconds,
        alive=alive,
        alive_ids=frozenset(row.environment_id for row in alive),
        connected_sizes=sizes,
        largest_size=max(sizes, default=1),
        token_share=sum(map(token_share_of, alive)),
        allocated=sum(row.min_batch_allocation or 0.0 for row in alive),
        most_batches_offpolicy=max((row.max_batches_offpolicy for row in rows), default=1),
    )


def token_share_of(row: EnvironmentRow) -> float:
    return row.max_token_length * max(0.0, row.weight)
