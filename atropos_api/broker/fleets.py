"""Fleets: the inference servers of each launcher, and the number of them that is wanted.

A launcher reports on its servers and thereby renews a lease; the answer names the number to aim at. `scale` asks for
another number: the request counts as followed once the launcher's report names it, and by then the launcher has
written it to its run directory. So the number survives a restart of either side: fleets are kept in memory, as the
registered servers are, and after a restart of the broker each launcher reports again, with the number that it follows.
A request that was not followed yet is lost then, and its caller was never told that it was followed.

Requests are numbered and the newest one counts. A launcher that learns by itself that it cannot have so many servers,
or that one was drained, reports a lower `wanted` under the same request, and that is the wanted number from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atropos_api.errors import CannotScale, FleetIdInUse, InvalidRequest, UnknownFleet
from atropos_api.wire.fleets import Fleet, FleetLease, FleetReport, FleetSet

LEASE_SECONDS: Final = 15.0
"""Lease of a launcher, which reports each second but may be busy for ten with a server that does not end."""

MOST_FLEETS: Final = 1024


@dataclass(slots=True)
class Entry:
    """One fleet: its launcher's last report, and the newest request."""

    report: FleetReport
    renewed_at: float
    wanted: int
    request: int


class Fleets:
    """The fleets of the launchers that report here. Not thread-safe, as the broker."""

    def __init__(self, clock: Callable[[], float], *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self.on_change: list[Callable[[Fleet], None]] = []
        """Called with a fleet when the number of its servers that is wanted, followed or running changes."""
        self._clock = clock
        self._complete_at = clock() + lease_seconds
        self._entries: dict[str, Entry] = {}

    def renew(self, fleet_id: str, report: FleetReport) -> FleetLease:
        """Register a fleet or renew its lease; return the number that its launcher should aim at."""
        self._expire()
        known = self._entries.get(fleet_id)
        if known is not None and known.report.launcher_id != report.launcher_id:
            left = known.renewed_at + self.lease_seconds - self._clock()
            raise FleetIdInUse(
                f"the fleet {fleet_id} belongs to another launcher for another {left:.0f} s; two launchers of one run "
                "directory cannot both run",
                field="launcher_id",
                value=report.launcher_id,
            )
        if known is None and len(self._entries) >= MOST_FLEETS:
            raise InvalidRequest(f"{MOST_FLEETS} fleets are registered, and no more are kept", field="fleet_id")
        entry = Entry(report, self._clock(), report.wanted, report.request)
        if known is not None and known.request > report.request:
            entry.wanted, entry.request = known.wanted, known.request
        self._entries[fleet_id] = entry
        if known is None or _shown(known) != _shown(entry):
            self._changed(fleet_id)
        return FleetLease(lease_seconds=self.lease_seconds, wanted=entry.wanted, request=entry.request)

    def scale(self, fleet_id: str, wanted: int) -> int:
        """Ask for a number of servers and return the number of this request; `is_followed` takes that number."""
        entry = self._find(fleet_id)
        report = entry.report
        if report.fixed:
            raise CannotScale(
                f"the number of servers of {fleet_id} is fixed: {report.fixed}", field="wanted", value=wanted
            )
        if not report.least <= wanted <= report.most:
            reason = f": {report.limit}" if report.limit and wanted > report.most else ""
            raise CannotScale(
                f"the launcher of {fleet_id} runs {report.least} to {report.most} servers, not {wanted}{reason}",
                field="wanted",
                value=wanted,
            )
        entry.wanted, entry.request = wanted, entry.request + 1
        self._changed(fleet_id)
        return entry.request

    def is_followed(self, fleet_id: str, request: int) -> bool:
        """Return True once the launcher has taken account of this request, or of a newer one."""
        return self._find(fleet_id).report.request >= request

    def remove(self, fleet_id: str, launcher_id: str) -> None:
        """End the lease of a launcher that ends; another launcher's is left alone."""
        if self._find(fleet_id).report.launcher_id == launcher_id:
            del self._entries[fleet_id]

    def describe(self, fleet_id: str) -> Fleet:
        return self._describe(fleet_id, self._find(fleet_id))

    def select(self) -> FleetSet:
        self._expire()
        return FleetSet(
            complete=self._clock() >= self._complete_at,
            fleets=[self._describe(fleet_id, entry) for fleet_id, entry in self._entries.items()],
        )

    def _find(self, fleet_id: str) -> Entry:
        self._expire()
        entry = self._entries.get(fleet_id)
        if entry is None:
            known = ", ".join(list(self._entries)[:10]) or "none"
            raise UnknownFleet(
                f"no launcher reports on a fleet {fleet_id!r} (known: {known})", field="fleet_id", value=fleet_id
            )
        return entry

    def _expire(self) -> None:
        """Forget the fleets whose launchers have not reported for a lease: none of them would carry out a request."""
        earliest = self._clock() - self.lease_seconds
        self._entries = {name: entry for name, entry in self._entries.items() if entry.renewed_at > earliest}

    def _changed(self, fleet_id: str) -> None:
        described = self._describe(fleet_id, self._entries[fleet_id])
        for listener in self.on_change:
            listener(described)

    def _describe(self, fleet_id: str, entry: Entry) -> Fleet:
        report = entry.report
        return Fleet(
            fleet_id=fleet_id,
            policy=report.policy,
            wanted=entry.wanted,
            running=report.running,
            least=report.least,
            most=report.most,
            request=entry.request,
            followed=report.request >= entry.request,
            silent_seconds=self._clock() - entry.renewed_at,
            limit=report.limit,
            fixed=report.fixed,
            note=report.note,
        )


def _shown(entry: Entry) -> tuple[object, ...]:
    """Return the part of a fleet's state that watchers see and callers wait for."""
    return entry.wanted, entry.report.request, entry.report.running, entry.report.note
