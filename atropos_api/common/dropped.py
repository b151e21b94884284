"""What a broker's status says about dropped groups, as lines to read, for whoever waits for a batch or watches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

FEW: Final = 8
"""Fewer dropped groups say nothing of a run yet."""


def explain_drops(status: Mapping[str, Any]) -> Iterator[str]:
    """A line for each environment that dropped more than a few groups: how many, why, an example, what to change."""
    for row in status.get("environments") or ():
        latest = row.get("latest_drop") if isinstance(row, Mapping) else None
        if latest and latest.get("explanation") and sum((row.get("dropped_groups") or {}).values()) >= FEW:
            yield f"{row.get('name')}: {latest['explanation']}"


def count_drops(status: Mapping[str, Any]) -> int:
    """Groups dropped so far, by environments and broker."""
    return sum((status.get("dropped_groups") or {}).values())
