"""What a broker's status says about dropped groups, as lines to read, for whoever waits for a batch or watches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def explain_drops(status: Mapping[str, Any]) -> Iterator[str]:
    """A line for each environment that dropped groups: how many, why, an example, and what to change."""
    for row in status.get("environments") or ():
        latest = row.get("latest_drop") if isinstance(row, Mapping) else None
        if latest and latest.get("explanation"):
            yield f"{row.get('name')}: {latest['explanation']}"


def count_drops(status: Mapping[str, Any]) -> int:
    """Groups dropped so far, by environments and broker."""
    return sum((status.get("dropped_groups") or {}).values())
