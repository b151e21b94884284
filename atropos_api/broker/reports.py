"""The reports of trainers and environments about themselves: this module takes them.

None is needed for training. A trainer whose run was taken over is refused, because its steps are no longer those of the
run.
"""

from __future__ import annotations

import msgspec

from atropos_api.broker.recent_batches import RecentBatches
from atropos_api.broker.run_metrics import RunMetrics
from atropos_api.broker.state import State
from atropos_api.wire.reports import EnvironmentActivity, RunReport, TokenReport


class Reports:
    """The reports: metrics go to the store, signs of trouble to the events, all else to memory."""

    def __init__(self, state: State, metrics: RunMetrics, recent: RecentBatches) -> None:
        self._state = state
        self._metrics = metrics
        self._recent = recent

    def take_run(self, run_id: str, report: RunReport) -> None:
        """Store the metrics of steps, and record a trainer's signs of trouble and its state.

        A sign that comes again, because the answer to its report was lost, is recorded once.
        """
        state = self._state
        run = state.runs.find(run_id, report.epoch)
        self._metrics.take(run.run_id, report.steps, known_runs=[row.run_id for row in state.runs.all()])
        for sign in report.signs:
            if not state.events.has("health", run_id=run.run_id, sign=sign.sign, step=sign.step):
                state.events.add("health", run_id=run.run_id, **msgspec.structs.asdict(sign))
        if report.activity is not None:
            state.activity.note_trainer(run.run_id, report.activity, state.clock())

    def take_tokens(self, run_id: str, number: int, report: TokenReport, body: bytes) -> bool:
        """Keep a trainer's values of tokens; return False if the batch is not among the newest any more."""
        run = self._state.runs.find(run_id, report.epoch)
        return self._recent.add_report(run.run_id, number, report.rank, body)

    def take_environment(self, environment_id: int, report: EnvironmentActivity) -> None:
        """Record what an environment says about its own state."""
        self._state.activity.note_environment(environment_id, report, self._state.clock())
