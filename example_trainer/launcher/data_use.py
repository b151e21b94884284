"""Use of the data in a run: what happened to each environment's items and groups, by the broker's counts.

The broker keeps the counts over restarts of every program, so they cover all launches of a run. The launcher writes
them to `data.json` when the training has ended, and the summary shows them beside the length of the trained answers: a
run that loses its long rollouts, because they time out or grow too old, trains shorter ones than it samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_api.common import metric_names as names
from atropos_api.common.files import write_whole

DATA_NAME = "data.json"
SHOWN_FIELDS = ("environment_id", "name", "items", "outcomes", "dropped_groups", "queued_sequences")


def write_data_use(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Write the counts of a broker's status; nothing if it has no environment."""
    known = [{name: entry.get(name) for name in SHOWN_FIELDS} for entry in _environments(status)]
    if known:
        write_whole(run_dir / DATA_NAME, json.dumps(known, indent=2) + "\n")


def read_data_use(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the counts of each environment; none if the run has written none."""
    try:
        content = json.loads((run_dir / DATA_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(entry for entry in content if isinstance(entry, Mapping)) if isinstance(content, list) else ()


def data_lines(data: Sequence[Mapping[str, Any]], trained: float | None) -> list[tuple[str, str]]:
    """Return rows of the summary's table; `trained` is the mean length of the trained answers."""
    lines = []
    for entry in data:
        items, outcomes = entry.get("items"), entry.get("outcomes") or {}
        if items:
            drops = _reasons(_dropped(entry))
            parts = [f"{items['drawn']:,} drawn", f"{outcomes.get('trained', 0):,} groups trained", *drops]
            parts += [f"{items['in_progress']:,} in progress"] if items["in_progress"] else []
            lines.append((f"items of {entry['name']}", ", ".join(parts)))
    sampled = _mean_length([entry["items"] for entry in data if entry.get("items")])
    if sampled is not None and trained is not None:
        lines.append(("mean answer length, sampled and trained", f"{sampled:.1f}, {trained:.1f}"))
    return lines


def data_table(data: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of the counts, a row for each environment."""
    heads = ["environment", "items drawn", "groups trained", "dropped", "in progress", "sequences in the queue"]
    rows = []
    for entry in data:
        items, outcomes = entry.get("items") or {}, entry.get("outcomes") or {}
        dropped = ", ".join(_reasons({**(entry.get("dropped_groups") or {}), **_dropped(entry)}))
        counts = [items.get("drawn"), outcomes.get("trained", 0), dropped or "none"]
        counts += [items.get("in_progress"), entry.get("queued_sequences")]
        rows.append([str(entry.get("name")), *(_count(value) for value in counts)])
    return heads, rows


def trained_length(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean length in tokens of all trained answers, by the steps of `metrics.jsonl`; None without any."""
    known = [row for row in rows if row.get(names.TRAINED_TOKENS) and row.get(names.TRAINED_LENGTH_MEAN)]
    tokens = sum(float(row[names.TRAINED_TOKENS]) for row in known)
    answers = sum(float(row[names.TRAINED_TOKENS]) / float(row[names.TRAINED_LENGTH_MEAN]) for row in known)
    return tokens / answers if answers else None


def _mean_length(items: Sequence[Mapping[str, Any]]) -> float | None:
    sequences = sum(entry["sampled_sequences"] for entry in items)
    return sum(entry["sampled_tokens"] for entry in items) / sequences if sequences else None


def _dropped(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of dropped items and groups by reason."""
    outcomes = (entry.get("outcomes") or {}).items()
    return {
        **(entry.get("items") or {}).get("dropped", {}),
        **{reason: n for reason, n in outcomes if reason != "trained"},
    }


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def _reasons(dropped: Mapping[str, int]) -> list[str]:
    return [f"{number:,} dropped ({reason})" for reason, number in sorted(dropped.items()) if number]


def _environments(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in status.get("environments", ()) if isinstance(entry, Mapping)]
