"""How much each environment should have under way: as much as can be trained before it is too old, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_api.store.base import EnvironmentRow, RunRow


def admission_limit(run: RunRow, max_batches_offpolicy: int, max_staleness: int | None) -> int:
    """Sequences that may be queued, batched and in flight together.

    A sequence begun now at place p of the line is trained in batch ceil(p / batch_size) from now, so it will be
    ceil(p / batch_size) - 1 steps old: within the budget as long as p is at most (budget + 1) batches.
    """
    batches = max_batches_offpolicy
    if max_staleness is not None:
        batches = min(batches, max_staleness + 1)
    return batches * run.batch_size


def room_for(
    environment: EnvironmentRow,
    alive: Sequence[EnvironmentRow],
    *,
    limit: int,
    outstanding: int,
    still_needed: int | None,
) -> int:
    """Sequences that `environment` may have in flight: its share of the room by weight, a whole group at least.

    `still_needed` is what the rest of the run can use at all; None if the run has no end.
    """
    room = limit - outstanding
    if still_needed is not None:
        room = min(room, still_needed)
    if room <= 0:
        return 0
    weights = {row.environment_id: max(0.0, row.weight) for row in alive}
    weights.setdefault(environment.environment_id, max(0.0, environment.weight))
    total = sum(weights.values())
    share = 1.0 / len(weights) if total <= 0 else weights[environment.environment_id] / total
    return max(int(room * share), environment.group_size)
