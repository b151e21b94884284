"""Liveness of a run's trainer. Calls of the Atropos contract carry no identity, so time decides.

A trainer is at work if it registered or called lately, and keeps its run from those of another name. How lately depends
on the run: a trainer asks for nothing while it trains, so three times its longest silence so far still counts.
"""

from __future__ import annotations

from typing import Final

from atropos_api.errors import RunInProgress
from atropos_api.store.base import RunRow

AT_WORK_SECONDS: Final = 30.0
LONGEST_INTERVALS: Final = 3
GONE_SECONDS: Final = 900.0
"""A trainer that was silent for so long does not come back to its run, unless it says which one it means."""


def note_call(run: RunRow, now: float, *, identified: bool) -> None:
    """The trainer of `run` called. A call that does not name the run is no sign of a trainer that had gone.

    It may be that of the next one: axolotl's asks for batches before it registers.
    """
    if not identified and has_gone(run, now):
        return
    run.longest_silence_seconds = max(run.longest_silence_seconds, quiet_seconds(run, now))
    run.trainer_seen_at = now


def note_registration(run: RunRow, now: float) -> None:
    """A trainer came (back) to `run`; how long nobody was there says nothing about how long it trains."""
    run.trainer_seen_at = now


def presume_at_work(run: RunRow, now: float) -> None:
    """Nobody could be heard while no broker ran: silence counts from here, unless it was long before."""
    if not has_gone(run, now):
        run.trainer_seen_at = now


def quiet_seconds(run: RunRow, now: float) -> float:
    """Seconds since the run's trainer was heard of."""
    return now - (run.trainer_seen_at or run.began_at)


def is_at_work(run: RunRow, now: float) -> bool:
    return quiet_seconds(run, now) <= _patience(run)


def has_gone(run: RunRow, now: float) -> bool:
    return quiet_seconds(run, now) > max(GONE_SECONDS, _patience(run))


def is_over(run: RunRow) -> bool:
    """A run of the Atropos contract, which nobody finishes, is over once its last batch was handed out."""
    return run.legacy and run.delivered and 0 < run.num_steps <= run.starting_step + run.handed_batch


def refuse_rival(run: RunRow | None, now: float) -> None:
    """Raise `RunInProgress` where somebody is at work on the open run, so that another name may not close it."""
    if run is None or is_over(run) or not is_at_work(run, now):
        return
    quiet = max(0.0, quiet_seconds(run, now))
    raise RunInProgress(
        f"run {run.name} ({run.run_id}) is open and its trainer asked {quiet:.0f} s ago: wait until it ends or has "
        f"been silent for {_patience(run):.0f} s, end it with POST /v1/runs/{run.run_id}/finish or GET /reset_data, "
        "take over with take_over (--take-over), restart the broker with --fresh, or use a second broker",
        run_id=run.run_id,
        name=run.name,
        quiet_seconds=quiet,
    )


def _patience(run: RunRow) -> float:
    return max(AT_WORK_SECONDS, LONGEST_INTERVALS * run.longest_silence_seconds)
