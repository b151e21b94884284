"""What the page, `atropos top`, and the progress view are shown: one mapping, made from counts alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from atropos_api.broker.broker import Broker
from atropos_api.store.base import EnvironmentRow, RunRow


def describe_status(broker: Broker) -> dict[str, Any]:
    state = broker.state
    run = state.runs.open or state.runs.last_finished
    oldest = state.queue.oldest()
    return {
        "time": state.clock(),
        "run": _describe_run(broker, run) if run is not None else None,
        "queue": {
            "groups": state.queue.groups,
            "sequences": state.queue.sequences,
            "bytes": state.queue.body_bytes,
            "oldest_age_seconds": state.clock() - oldest.arrived_at if oldest is not None else None,
            **_describe_unpackable(broker),
        },
        "batches": {
            "uncommitted": {str(n): sum(group.size for group in groups) for n, groups in state.batches.items()},
            "outstanding_sequences": broker.outstanding_sequences(run) if run is not None else state.queue.sequences,
        },
        "environments": [_describe_environment(broker, row) for row in state.environments],
        "left_over_groups": {run_id: len(groups) for run_id, groups in state.left_over.items()},
        "store": {"bytes": state.bodies.size_bytes()},
        "dropped_groups": state.drops.totals(),
        "counters": asdict(state.counters),
    }


def _describe_run(broker: Broker, run: RunRow) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(run),
        # Without the ids, which are all it takes to end a hold.
        "holds": [
            {"seconds": row.until - broker.state.clock(), "version": row.version, "reason": row.reason}
            for row in broker.holds.alive(run)
        ],
        "current_step": broker.trained_steps(run),
        "next_batch": run.formed_batch + 1,
    }


def _describe_unpackable(broker: Broker) -> dict[str, Any]:
    """What is queued and fits into no batch of the open run."""
    run, counts = broker.state.runs.open, broker.state.queue.groups_by_size
    sizes = broker.batches.unpackable_sizes(run) if run is not None else []
    return {"unpackable_sizes": sizes, "unpackable_groups": sum(counts[size] for size in sizes)}


def _describe_environment(broker: Broker, row: EnvironmentRow) -> dict[str, Any]:
    state = broker.state
    quiet = state.clock() - row.seen_at
    latest = state.drops.latest_of(row.environment_id)
    return {
        "environment_id": row.environment_id,
        "name": row.display_name,
        "group_size": row.group_size,
        "weight": row.weight,
        "connected": row.connected and quiet <= state.settings.environment_timeout_seconds,
        "quiet_seconds": quiet,
        "queued_sequences": state.queue.sequences_by_env.get(row.environment_id, 0),
        "dropped_groups": state.drops.of(row.environment_id),
        "latest_drop": latest._asdict() if latest is not None else None,
    }
