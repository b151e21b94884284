"""Counts since the start of the process: totals of all kinds, and the groups dropped instead of trained.

`/metrics` shows each field of `Counters` under its name, with its meaning. `Drops` counts by environment and reason:
environments report the groups they did not submit, and the broker adds those it dropped itself. Without these counts an
environment whose reward is always the same looks like a slow start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from atropos_api.store.base import GroupRow
from atropos_api.wire.messages import DropReport

MEANING: Final = "meaning"


def _counter(meaning: str) -> Any:
    return field(default=0, metadata={MEANING: meaning})


@dataclass(slots=True)
class Counters:
    groups_received_total: int = _counter("Groups that were accepted")
    sequences_received_total: int = _counter("Sequences that were accepted")
    tokens_received_total: int = _counter("Tokens that were accepted")
    groups_duplicate_total: int = _counter("Repeats of accepted groups that were recognised")
    groups_refused_total: int = _counter("Groups that no trainer could use")
    groups_expired_total: int = _counter("Groups dropped because they would have been too old when trained")
    groups_orphaned_total: int = _counter("Groups of policies that a resumed run discarded")
    groups_without_version_total: int = _counter("Groups without the policy versions of their tokens")
    groups_unregistered_total: int = _counter("Groups of environments that are not registered")
    groups_unpackable_total: int = _counter("Groups of a size that no batch of the run can hold")
    groups_left_over_total: int = _counter("Groups that a run which ended did not train")
    groups_lost_total: int = _counter("Groups that were damaged on the disk")
    batches_formed_total: int = _counter("Batches that were formed")
    batches_handed_total: int = _counter("Batches that were handed out, each counted once")
    batches_committed_total: int = _counter("Batches that a checkpoint covers")
    minima_waived_total: int = _counter("Batches formed without some environment's minimum")
    publishes_while_held_total: int = _counter("Policies published although an evaluation held the one before")
    pressure_total: int = _counter("Submissions answered 503 because the queue was full")
    store_failures_total: int = _counter("Writes that the store refused")


logger = logging.getLogger(__name__)

LINE_SECONDS: Final = 30.0

OWN_REASONS: Final[Mapping[str, str]] = {
    "too-old": "their policy would be older than --max-staleness allows; raise it, or let environments have fewer "
    "groups in flight (--env.max_batches_offpolicy)",
    "orphaned": "a resumed run discarded their policy (--drop-orphaned)",
    "other-policy": "they are of another policy than the run that began trains (--policy)",
    "unpackable": "no batch of the run can hold groups of their size; use a group size that divides the batch size",
    "damaged": "their bodies were damaged on the disk",
    "refused": "no trainer could use them; the log lines above name field and value",
}
"""Reasons for which the broker itself drops groups, each with an explanation or a remedy."""


class LatestDrop(msgspec.Struct):
    explanation: str
    time: float


class Drops:
    """Dropped groups by environment id (None: from no registered environment) and reason."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[int | None, Counter[str]] = {}
        self._latest: dict[int | None, LatestDrop] = {}
        self._reports: dict[int, DropReport] = {}
        self._logged_at: dict[str, float] = {}

    def take_report(self, environment_id: int, report: DropReport) -> int:
        """Record an environment's totals and return how many groups are new. A report received twice adds nothing."""
        known = self._reports.get(environment_id)
        before = known.groups if known is not None and known.session == report.session else {}
        added = {reason: total - before.get(reason, 0) for reason, total in report.groups.items()}
        added = {reason: count for reason, count in added.items() if count > 0}
        self._counts.setdefault(environment_id, Counter()).update(added)
        self._latest[environment_id] = LatestDrop(report.explanation, self._clock())
        report.groups = {**before, **{reason: report.groups[reason] for reason in added}}
        self._reports[environment_id] = report
        return sum(added.values())

    def count(self, groups: Iterable[GroupRow], reason: str) -> None:
        """Count groups that the broker drops itself."""
        for environment_id, number in Counter(group.env_id for group in groups).items():
            self.count_of(environment_id, reason, number)

    def count_of(self, environment_id: int | None, reason: str, number: int = 1) -> None:
        """Count dropped groups of one environment; log a warning at most every 30 s for each reason."""
        counts = self._counts.setdefault(environment_id, Counter())
        counts[reason] += number
        now = self._clock()
        self._latest[environment_id] = LatestDrop(f"{counts[reason]} groups dropped: {OWN_REASONS[reason]}", now)
        if now - self._logged_at.get(reason, float("-inf")) >= LINE_SECONDS:
            self._logged_at[reason] = now
            total = sum(one[reason] for one in self._counts.values())
            logger.warning("groups dropped so far as %s: %d: %s", reason, total, OWN_REASONS[reason])

    def of(self, environment_id: int | None) -> dict[str, int]:
        """Return the counts of one environment by reason."""
        return dict(self._counts.get(environment_id, {}))

    def latest_of(self, environment_id: int) -> LatestDrop | None:
        return self._latest.get(environment_id)

    def totals(self) -> dict[str, int]:
        """Return the counts of all environments together, by reason."""
        return dict(sum(self._counts.values(), Counter()))

    def __iter__(self) -> Iterator[tuple[int | None, str, int]]:
        for environment_id, counts in self._counts.items():
            for reason, number in counts.items():
                yield environment_id, reason, number
