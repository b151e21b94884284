"""Policy holds: leases by which an evaluation that needs one policy version asks the trainer to publish no other.

The broker cannot keep a trainer from publishing. It reports holds to the trainer (`GET /v1/policy` before each publish,
and the answer to `PUT /v1/policy`), and it reports to the evaluation afterwards whether its version was kept. Leases
are part of the run's row, so they survive a restart of the broker, and they expire by themselves.
"""

from __future__ import annotations

import secrets

import msgspec

from atropos_api.broker.state import State
from atropos_api.errors import UnknownHold
from atropos_api.store.base import HoldRow, RunRow
from atropos_api.wire.messages import LONGEST_HOLD_SECONDS, Hold, HoldRequest


class PolicyHolds:
    """The policy holds of the open run."""

    def __init__(self, state: State) -> None:
        self._state = state

    def hold(self, request: HoldRequest) -> Hold:
        """Grant a lease, or renew the one of this id."""
        run = self._state.runs.require_open()
        now = self._state.clock()
        until = now + request.seconds
        if request.hold_id is None:
            hold_id = secrets.token_urlsafe(16)
            version, reason = run.policy_version, request.reason
            row = HoldRow(hold_id=hold_id, until=until, version=version, reason=reason, since=now)
        else:
            row = msgspec.structs.replace(self._find(run, request.hold_id), until=until)
        self._keep(run, (*self._others(run, row.hold_id), row), "policy-held", row)
        return self._describe(run, row)

    def bound_leases(self) -> None:
        """Shorten the leases that a broker before this one granted, if the machine's clock has been set back since.

        The end of a lease is a time of day, so the trainer would wait for days, also that of a run which is closed now
        and resumed later. None lasts longer than a new one may.
        """
        now = self._state.clock()
        for run in self._state.runs.all():
            run.holds = tuple(_bounded(row, now) for row in run.holds)

    def release(self, hold_id: str) -> Hold:
        run = self._state.runs.require_open()
        row = msgspec.structs.replace(self._find(run, hold_id), until=self._state.clock())
        self._keep(run, self._others(run, hold_id), "policy-released", row)
        return self._describe(run, row)

    def release_all(self) -> None:
        run = self._state.runs.require_open()
        for row in self.alive(run):
            self.release(row.hold_id)

    def alive(self, run: RunRow) -> tuple[HoldRow, ...]:
        now = self._state.clock()
        return tuple(row for row in run.holds if row.until > now)

    def seconds(self, run: RunRow) -> float:
        """Return for how many seconds the trainer should leave the policy unchanged, unless a lease is renewed."""
        now = self._state.clock()
        return max((row.until - now for row in run.holds if row.until > now), default=0.0)

    def _others(self, run: RunRow, hold_id: str) -> tuple[HoldRow, ...]:
        return tuple(row for row in self.alive(run) if row.hold_id != hold_id)

    def _find(self, run: RunRow, hold_id: str) -> HoldRow:
        for row in self.alive(run):
            if secrets.compare_digest(row.hold_id.encode(), hold_id.encode()):
                return row
        raise UnknownHold("no hold has this id: it was released or ran out, and the policy may have changed since")

    def _keep(self, run: RunRow, rows: tuple[HoldRow, ...], event: str, row: HoldRow) -> None:
        self._state.runs.change(run, holds=rows)
        self._state.events.add(event, run_id=run.run_id, version=row.version, reason=row.reason)
        self._state.pacing_changed()

    def _describe(self, run: RunRow, row: HoldRow) -> Hold:
        return Hold(
            hold_id=row.hold_id,
            seconds=max(0.0, row.until - self._state.clock()),
            policy_version=row.version,
            kept=row.version == run.policy_version,
        )


def _bounded(row: HoldRow, now: float) -> HoldRow:
    seconds = min(LONGEST_HOLD_SECONDS, row.until - row.since)
    return msgspec.structs.replace(row, since=min(row.since, now), until=min(row.until, now + seconds))
