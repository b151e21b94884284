"""Group sizes that the open run can use. They are judged together: 3 and 5 fill a batch of 8, neither does alone.

An environment whose size lacks a partner is not refused, for the partner may come a moment later: one of the Atropos
contract is told to ask again, one of v1 is registered, and both produce nothing until then. A warning carries the
arithmetic.
"""

from __future__ import annotations

import logging
from typing import Final

from atropos_api.broker.packing import can_fill
from atropos_api.broker.state import State
from atropos_api.errors import UnusableGroupSize
from atropos_api.store.base import EnvironmentRow, RunRow

logger = logging.getLogger(__name__)

ASKING_SECONDS: Final = 10.0
"""Environments of the Atropos contract that are told to wait ask again each second."""


MOST_TOLD: Final = 1000
"""Names remembered so that no warning is repeated."""


class GroupSizes:
    """The judgement on group sizes: those that may be registered, and those whose groups are of use now."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._asking: dict[tuple[str, int], float] = {}
        self._told: dict[str, str] = {}
        """The last warning about each environment that waits, by its name."""

    def refuse_too_large(self, size: int) -> None:
        """Refuse a size that no partner could help."""
        run = self._state.runs.open
        if run is not None and run.unit == "sequences" and size > run.batch_size:
            raise UnusableGroupSize(
                f"groups of {size} are larger than a batch of {run.batch_size} sequences: choose a smaller group size, "
                "or a larger batch size in the trainer",
                field="group_size",
                value=size,
                batch_size=run.batch_size,
            )

    def ask(self, name: str, size: int) -> str | None:
        """Ask to register an environment: the answer is None, or the reason to wait."""
        run = self._state.runs.open
        self._asking[name, size] = self._state.clock()
        if run is None or self.can_use(run, size):
            del self._asking[name, size]
            self._told.pop(name, None)
            return None
        self._tell(name, run, size)
        return self.explain(run, size)

    def can_use(self, run: RunRow, size: int, *, keeps_coming: bool = False) -> bool:
        """A group of this size is of use if some batch can hold it, provided that groups of the registered sizes come.

        Of other sizes only what is queued counts, unless the group's own `keeps_coming`.
        """
        if run.unit == "groups":
            return True
        known = self._state.registered_sizes()
        if run.batch_size % size == 0 and (keeps_coming or size in known):
            return True
        known = known | self._asked_for() | ({size} if keeps_coming else set())
        queued = self._state.queue.groups_by_size
        waiting = {other: count for other, count in queued.items() if other not in known}
        return can_fill(known, run.batch_size, containing=size, at_most=waiting)

    def reason_to_pause(self, run: RunRow, row: EnvironmentRow) -> str | None:
        """The reason why no group of this environment can be trained now; None if some can."""
        return None if self.can_use(run, row.group_size) else self.explain(run, row.group_size)

    def warn(self) -> None:
        """Say once which registered environments the open run has no use for."""
        run = self._state.runs.open
        sizes = self._state.registered_sizes() if run is not None else ()
        useless = {size for size in sizes if run is not None and not self.can_use(run, size)}
        if not useless and not self._told:
            return
        for row in self._state.environments:
            if run is not None and row.connected and row.group_size in useless:
                self._tell(row.display_name, run, row.group_size)
            else:
                self._told.pop(row.display_name, None)

    def explain(self, run: RunRow, size: int) -> str:
        """The arithmetic, and what would help."""
        if size > run.batch_size:
            return f"groups of {size} are larger than a batch of {run.batch_size} sequences; the trainer's is too small"
        others = sorted((self._state.registered_sizes() | self._asked_for()) - {size})
        beside = f" with those of {', '.join(map(str, others))}" if others else " alone"
        rest = run.batch_size % size
        return (
            f"groups of {size}{beside} never fill {run.batch_size} sequences; an environment with groups of {rest} "
            f"would complete them, or a batch size of {run.batch_size - rest} or {run.batch_size - rest + size}"
        )

    def _asked_for(self) -> frozenset[int]:
        """Sizes of those that asked lately and were told to wait."""
        since = self._state.clock() - ASKING_SECONDS
        self._asking = {asked: when for asked, when in self._asking.items() if when >= since}
        return frozenset(size for _, size in self._asking)

    def _tell(self, name: str, run: RunRow, size: int) -> None:
        text = f"environment {name} waits in run {run.name}: {self.explain(run, size)}"
        if self._told.get(name) == text:
            return
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told[name] = text
        logger.warning("%s", text)
        self._state.events.add("group-size-waits", name=name, group_size=size, batch_size=run.batch_size)
