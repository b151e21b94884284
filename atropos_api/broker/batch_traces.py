"""Traces of groups at the broker: a span `batch` from a group's arrival to the batch that it is in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from atropos_api.common.tracing import FIELD, Tracing
from atropos_api.store.base import GroupRow
from atropos_api.wire.group_json import CheckedGroup

MOST_TRACED: Final = 100_000
"""Traced groups that are remembered while they wait; beyond that number the oldest are forgotten and get no span."""

_TRACEPARENT: Final = re.compile(rb'"%b":\s*"(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})"' % FIELD.encode())


class BatchTraces:
    """The traced groups that wait for a batch. A restart of the broker forgets them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._waiting: dict[int, str] = {}

    def on_queued(self, groups: Sequence[CheckedGroup], rows: Sequence[GroupRow]) -> None:
        """Remember the traces of groups that were queued."""
        for group, row in zip(groups, rows, strict=True):
            # From the end: in JSON the tokens come first, and `generation_params` after them.
            found = _TRACEPARENT.search(group.text, max(0, group.text.rfind(b'"generation_params"')))
            if found is not None:
                self._waiting[row.seq] = found[1].decode()
        while len(self._waiting) > MOST_TRACED:
            del self._waiting[next(iter(self._waiting))]

    def on_formed(self, run_id: str, number: int, rows: Sequence[GroupRow]) -> None:
        """Record a span for each traced group of a batch that was formed."""
        for row in rows:
            parent = self._waiting.pop(row.seq, None)
            if parent is not None:
                span = self._tracing.begin(
                    "batch", parent=parent, at_seconds=row.arrived_at, batch=number, run_id=run_id, rollouts=row.size
                )
                span.end()
