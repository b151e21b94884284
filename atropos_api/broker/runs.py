"""Runs and policies: the open run, its owner, the age of a policy version in trainer steps, and trainer liveness.

Calls of the Atropos contract carry no identity, so elapsed time decides whether a trainer is alive. A trainer is at
work if it registered or called recently; it then keeps trainers of another name from closing its run. How recently
depends on the run: a trainer sends no request while it trains, so three times its longest silence so far still counts.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from atropos_api.errors import NoOpenRun, PolicyNotNewer, RunInProgress, StoreUnavailable, SupersededRun, UnknownRun
from atropos_api.store.base import Ledger, PolicyRow, RunRow
from atropos_api.wire.messages import PolicyUpdate, RunRequest

WRITE_CALLS_SECONDS: Final = 60.0
"""Interval at which the time of the trainer's last call is written to the ledger."""


class Runs:
    """All runs in this store. At most one is open; a second trainer takes it over or begins another."""

    def __init__(self, ledger: Ledger, rows: Iterable[RunRow], policies: Iterable[PolicyRow]) -> None:
        self._ledger = ledger
        self._rows = {row.run_id: row for row in rows}
        self._policies: dict[tuple[str, int], PolicyRow] = {}
        for policy in policies:
            self._policies[policy.run_id, policy.version] = policy
        self.open: RunRow | None = next((row for row in self._rows.values() if row.state == "open"), None)
        finished = [row for row in self._rows.values() if row.state == "finished"]
        self.last_finished: RunRow | None = max(finished, key=lambda row: row.began_at, default=None)
        self._calls_written_at = 0.0

    def require_open(self, run_id: str | None = None, epoch: int | None = None) -> RunRow:
        """Return the open run; `run_id` and `epoch`, where given, must match it."""
        run = self.open
        if run_id is not None and run_id not in self._rows:
            raise UnknownRun(f"no run has the id {run_id!r}", field="run_id", value=run_id)
        if run is None:
            raise NoOpenRun("no run is open; begin one with POST /v1/runs")
        if run_id is not None and run_id != run.run_id:
            raise SupersededRun(
                f"run {run_id} is {self._rows[run_id].state}; run {run.run_id} ({run.name}) is open now",
                run_id=run_id,
                open_run_id=run.run_id,
            )
        _check_epoch(run, epoch)
        return run

    def note_trainer(self, run: RunRow, now: float, *, identified: bool) -> None:
        """Record a call of the open run's trainer; write it to the ledger now and then, for the next restart."""
        note_call(run, now, identified=identified)
        if run.trainer_seen_at - self._calls_written_at >= WRITE_CALLS_SECONDS:
            self._calls_written_at = now
            with suppress(StoreUnavailable):
                self._ledger.put_run(run)

    def presume_trainer_at_work(self, now: float) -> None:
        """Apply `presume_at_work` to the open run, at start."""
        if self.open is not None:
            presume_at_work(self.open, now)

    def find(self, run_id: str, epoch: int | None = None) -> RunRow:
        """Return the run of that id, open or not; `epoch`, where given, must match it."""
        row = self._rows.get(run_id)
        if row is None:
            raise UnknownRun(f"no run has the id {run_id!r}", field="run_id", value=run_id)
        _check_epoch(row, epoch)
        return row

    def has_finished(self, run_id: str | None) -> bool:
        row = self._rows.get(run_id or "")
        return row is not None and row.state == "finished"

    def find_by_name(self, name: str) -> RunRow | None:
        """Return the newest run of that name, the open one first."""
        namesakes = [row for row in self._rows.values() if row.name == name and not row.legacy]
        return max(namesakes, key=lambda row: (row.state == "open", row.began_at), default=None)

    def keep(self, row: RunRow) -> None:
        """Record a run's new state. The caller passes a changed copy, so that a refused write changes nothing."""
        self._ledger.put_run(row)
        self._rows[row.run_id] = row
        if row.state == "open":
            self.open = row
        elif self.open is not None and self.open.run_id == row.run_id:
            self.open = None
        if row.state == "finished":
            self.last_finished = row
        elif self.last_finished is not None and self.last_finished.run_id == row.run_id:
            self.last_finished = None

    def change(self, row: RunRow, **changes: object) -> RunRow:
        changed = msgspec.structs.replace(row, **changes)
        self.keep(changed)
        return changed

    @property
    def policy_count(self) -> int:
        """The number of versions that were ever announced."""
        return len(self._policies)

    def all(self) -> list[RunRow]:
        """Return every run, the oldest first."""
        return sorted(self._rows.values(), key=lambda row: row.began_at)

    def time_after_all(self, now: float) -> float:
        """Return the time to record as a new run's beginning: later than that of each run so far, because runs are put
        in order by it, and the machine's clock may have been set back.
        """
        newest = max((row.began_at for row in self._rows.values()), default=now)
        return now if now >= newest else math.nextafter(newest, math.inf)

    def highest_version(self) -> int:
        return max((version for _, version in self._policies), default=0)

    def record_policy(self, run: RunRow, update: PolicyUpdate, now: float) -> bool:
        """Record a publish, or a later step of the newest version; return False if it was known already.

        A step without a training signal changes no weights: the run is one step further, but the version stays, with
        the step it was published at (its age counts from there).
        """
        known = self._policies.get((run.run_id, update.version))
        if known is not None and update.version == run.policy_version and update.step > (run.policy_step or 0):
            self.change(run, policy_step=update.step)
            return True
        if known is not None and (known.step == update.step or update.version == run.policy_version):
            return False
        if run.policy_version is not None and update.version <= run.policy_version:
            raise PolicyNotNewer(
                f"version {update.version} (step {update.step}) is not above {run.policy_version} "
                f"(step {run.policy_step}); a publish takes a version that was never used",
                version=update.version,
                highest_version=run.policy_version,
            )
        row = PolicyRow(run_id=run.run_id, version=update.version, step=update.step, published_at=update.published_at)
        with self._ledger.transaction():
            self._ledger.put_policy(row)
            self.change(
                run,
                policy_version=update.version,
                policy_step=update.step,
                published_at=now,
                policy_name=update.policy_name,
            )
        self._policies[run.run_id, update.version] = row
        return True

    def orphan_policies(self, run_id: str, after_step: int) -> None:
        """Mark as orphaned the versions published after the checkpoint that the run resumes from.

        They belong to training steps that the resumed run discards.
        """
        for row in self._policies.values():
            if row.run_id == run_id and row.step > after_step and not row.orphaned:
                row.orphaned = True
                self._ledger.put_policy(row)

    def is_orphaned(self, run: RunRow, version: int | None) -> bool:
        row = None if version is None else self._policies.get((run.run_id, version))
        return row is not None and row.orphaned

    def step_of(self, run: RunRow, version: int | None) -> int | None:
        """Return the trainer step of a version; the newest step for one not announced yet; None if unknown."""
        if version is None:
            return None
        row = self._policies.get((run.run_id, version))
        if row is not None:
            return row.step
        announced = run.policy_version
        return run.policy_step if announced is not None and version > announced else None


def _check_epoch(run: RunRow, epoch: int | None) -> None:
    if epoch is not None and epoch != run.epoch:
        raise SupersededRun(
            f"run {run.run_id} was taken over: its epoch is {run.epoch}, the call's is {epoch}",
            run_id=run.run_id,
            epoch=run.epoch,
        )


def make_run(request: RunRequest, now: float, *, first_after: int) -> RunRow:
    """Return a new run whose first batch is the one after `first_after`."""
    return RunRow(
        run_id=f"run-{uuid.uuid4().hex[:12]}",
        name=request.name,
        legacy=False,
        state="open",
        epoch=1,
        batch_size=request.batch_size,
        max_token_length=request.max_token_length,
        num_steps=request.num_steps,
        starting_step=0,
        checkpoint_dir=request.checkpoint_dir,
        checkpoint_interval=request.checkpoint_interval,
        wandb_project=request.wandb_project,
        wandb_group=request.wandb_group,
        max_staleness=request.max_staleness,
        unit=request.unit,
        policy=request.policy,
        batches_dir=request.batches_dir,
        began_at=now,
        trainer_seen_at=now,
        committed_batch=first_after,
        formed_batch=first_after,
        handed_batch=first_after,
    )


AT_WORK_SECONDS: Final = 30.0
LONGEST_INTERVALS: Final = 3
GONE_SECONDS: Final = 900.0
"""A trainer silent for longer is presumed gone: only a call that names its run counts as its return."""


def note_call(run: RunRow, now: float, *, identified: bool) -> None:
    """Record a call of the run's trainer; a call that does not name the run is ignored once the trainer is gone.

    It may come from the next run's trainer: axolotl's asks for batches before it registers.
    """
    if not identified and has_gone(run, now):
        return
    run.longest_silence_seconds = max(run.longest_silence_seconds, quiet_seconds(run, now))
    run.trainer_seen_at = now


def note_registration(run: RunRow, now: float) -> None:
    """Record that a trainer registered with `run`, for the first time or again.

    The time without a trainer before it does not count as the trainer's silence.
    """
    run.trainer_seen_at = now


def presume_at_work(run: RunRow, now: float) -> None:
    """Count the trainer's silence from now, because no call could arrive while no broker ran.

    A trainer that had gone before stays gone.
    """
    if not has_gone(run, now):
        run.trainer_seen_at = now


def quiet_seconds(run: RunRow, now: float) -> float:
    """Return the seconds since the run's trainer last called."""
    return now - (run.trainer_seen_at or run.began_at)


def is_at_work(run: RunRow, now: float) -> bool:
    return quiet_seconds(run, now) <= silence_limit(run)


def has_gone(run: RunRow, now: float) -> bool:
    return quiet_seconds(run, now) > max(GONE_SECONDS, silence_limit(run))


def is_over(run: RunRow) -> bool:
    """Return True if a run of the Atropos contract has delivered its last batch.

    Such a run is over then, because the contract has no call to finish it.
    """
    return run.legacy and run.delivered and 0 < run.num_steps <= run.starting_step + run.handed_batch


def refuse_rival(run: RunRow | None, now: float) -> None:
    """Raise `RunInProgress` if a trainer is at work on the open run, so that another name may not close it."""
    if run is None or is_over(run) or not is_at_work(run, now):
        return
    quiet = max(0.0, quiet_seconds(run, now))
    raise RunInProgress(
        f"run {run.name} ({run.run_id}) is open and its trainer asked {quiet:.0f} s ago: wait until it ends or has "
        f"been silent for {silence_limit(run):.0f} s, end it with POST /v1/runs/{run.run_id}/finish or "
        "GET /reset_data, take over with take_over (--take-over), restart the broker with --fresh, or use a second "
        "broker",
        run_id=run.run_id,
        name=run.name,
        quiet_seconds=quiet,
    )


def silence_limit(run: RunRow) -> float:
    """Return for how long a trainer at work on this run may be silent."""
    return max(AT_WORK_SECONDS, LONGEST_INTERVALS * run.longest_silence_seconds)
