"""The reports of trainers and environments about themselves, for those who watch a run; none is needed for training.

`RunMetrics` keeps the metrics of steps, a row for each step of each run: in the store, and in memory once asked for. A
report of a step that is known replaces it, so a report may be repeated. The store holds the newest `MOST_STEPS` steps
of the newest `MOST_RUNS` runs. The tables of at most `MOST_TABLES` runs are in memory, fewer if they are large, and
reading one is spread over several calls: a run of 100,000 steps is tens of megabytes, and other requests should be
served in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from atropos_api.broker.recent_batches import RecentBatches
from atropos_api.broker.state import State
from atropos_api.errors import InvalidRequest
from atropos_api.page.series import MetricTable
from atropos_api.store.base import Ledger, MetricsRow
from atropos_api.wire.reports import EnvironmentActivity, RunReport, StepMetrics, TokenReport

MOST_STEPS: Final = 200_000
MOST_RUNS: Final = 20
MOST_TABLES: Final = 4
MOST_TABLE_BYTES: Final = 256 * 2**20
"""Limit on the bytes of all tables in memory; the one that is read now is kept whatever its size."""
MOST_NAMES: Final = 2000
"""Limit on the metric names of a run; each environment adds a few."""

ROWS_A_READ: Final = 5000
TRIM_EVERY: Final = 1000
"""The oldest steps of a run that has more than `MOST_STEPS` are deleted only once in this many steps."""


class Reports:
    """The reports: metrics go to the store, signs of trouble to the events, all else to memory.

    A trainer whose run was taken over is refused, because its steps are no longer those of the run.
    """

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
        if report.steps:
            state.activity.note_step(run.run_id, state.clock())
        if report.activity is not None:
            state.activity.note_trainer(run.run_id, report.activity, state.clock())

    def take_tokens(self, run_id: str, number: int, report: TokenReport, body: bytes) -> bool:
        """Keep a trainer's values of tokens; return False if the batch is not among the newest any more."""
        run = self._state.runs.find(run_id, report.epoch)
        return self._recent.add_report(run.run_id, number, report.rank, body)

    def take_environment(self, environment_id: int, report: EnvironmentActivity) -> None:
        """Record what an environment says about its own state."""
        self._state.activity.note_environment(environment_id, report, self._state.clock())


class RunMetrics:
    """The metrics of all runs in this store."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._names = ledger.metric_names()
        self._tables: OrderedDict[str, MetricTable] = OrderedDict()
        self._unread: set[str] = set()
        """Runs of which only the first steps are in memory yet."""
        self._last_steps: dict[str, int] = {}
        self._latest: dict[str, dict[str, float]] = {}

    def take(self, run_id: str, steps: Sequence[StepMetrics], *, known_runs: Sequence[str]) -> None:
        """Store a report; `known_runs` are the ids of all runs, oldest first."""
        if not steps:
            return
        names = self._extended(run_id, steps)
        rows = [_to_row(one, names) for one in steps]
        if names is not self._names.get(run_id):
            self._ledger.put_metric_names(run_id, names)
            self._names[run_id] = names
            self._forget_oldest_runs(known_runs, reporting=run_id)
        self._ledger.put_metrics(run_id, rows)
        self._add_to_table(run_id, names, rows)
        self._latest = {run_id: steps[-1].values}
        before = self._last_steps.get(run_id, 0)
        self._last_steps[run_id] = newest = max([before, *(row.step for row in rows)])
        if newest > MOST_STEPS and newest // TRIM_EVERY > before // TRIM_EVERY:
            self._trim(run_id, newest - MOST_STEPS)

    def drop_after(self, run_id: str, step: int) -> None:
        """Delete the steps after `step`, which a resumed run trains again."""
        self._last_steps.pop(run_id, None)
        self._latest.pop(run_id, None)
        if run_id in self._names:
            self._ledger.drop_metrics(run_id, step + 1, 2**53)
            self._forget_table(run_id)

    def last_step(self, run_id: str) -> int | None:
        """Return the last step reported since this process began; it shows a watcher that there is more to read."""
        return self._last_steps.get(run_id)

    def latest(self, run_id: str) -> dict[str, float]:
        """Return the metrics of the newest step reported since this process began."""
        return self._latest.get(run_id, {})

    def has(self, run_id: str) -> bool:
        return run_id in self._names

    def read_part(self, run_id: str) -> bool:
        """Read a part of a run's table into memory; return False once it is complete."""
        if run_id in self._tables and run_id not in self._unread:
            return False
        table = self._tables.setdefault(run_id, MetricTable())
        self._unread.add(run_id)
        table.name_columns(self._names.get(run_id, []))
        last = table.last_step
        rows = self._ledger.metrics_after(run_id, -1 if last is None else last, ROWS_A_READ)
        table.extend(rows)
        if len(rows) == ROWS_A_READ:
            return True
        self._unread.discard(run_id)
        self._tables.move_to_end(run_id)
        while len(self._tables) > 1 and (len(self._tables) > MOST_TABLES or self._table_bytes() > MOST_TABLE_BYTES):
            self._forget_table(next(iter(self._tables)))
        return False

    def table(self, run_id: str) -> MetricTable:
        """Return a run's table, as far as it was read."""
        if run_id in self._tables:
            self._tables.move_to_end(run_id)
        table = self._tables.get(run_id)
        return MetricTable() if table is None else table

    def _add_to_table(self, run_id: str, names: Sequence[str], rows: Sequence[MetricsRow]) -> None:
        table = self._tables.get(run_id)
        if table is None:
            return
        table.name_columns(names)
        last_read = table.last_step
        for row in rows:
            # Steps beyond those read so far will be read from the store.
            if run_id not in self._unread or (last_read is not None and row.step <= last_read):
                table.put(row.step, row.time, np.frombuffer(row.numbers, dtype="<f8"))

    def _extended(self, run_id: str, steps: Sequence[StepMetrics]) -> list[str]:
        """Return the names of the run with those of these steps; the same list if none is new."""
        known = self._names.get(run_id, [])
        old = set(known)
        fresh = dict.fromkeys(name for one in steps for name in one.values if name not in old)
        if run_id in self._names and not fresh:
            return known
        if len(known) + len(fresh) > MOST_NAMES:
            raise InvalidRequest(
                f"run {run_id} would have {len(known) + len(fresh)} names of metrics, and {MOST_NAMES} are allowed; "
                "report fewer",
                field="steps",
                value=next(iter(fresh), ""),
            )
        return [*known, *fresh]

    def _table_bytes(self) -> int:
        return sum(table.size_bytes for table in self._tables.values())

    def _trim(self, run_id: str, last: int) -> None:
        """Delete the steps up to `last`."""
        self._ledger.drop_metrics(run_id, 0, last)
        if run_id in self._tables:
            self._tables[run_id].drop(0, last)

    def _forget_oldest_runs(self, known_runs: Sequence[str], *, reporting: str) -> None:
        """Forget all but the newest runs; the one that is reporting stays, because an old run may be resumed."""
        order = {run_id: place for place, run_id in enumerate(known_runs)}
        oldest = sorted(self._names.keys() - {reporting}, key=lambda run_id: order.get(run_id, -1))
        for run_id in oldest[: max(0, len(self._names) - MOST_RUNS)]:
            self._ledger.forget_metrics(run_id)
            del self._names[run_id]
            self._forget_table(run_id)

    def _forget_table(self, run_id: str) -> None:
        self._tables.pop(run_id, None)
        self._unread.discard(run_id)


def _to_row(one: StepMetrics, names: Sequence[str]) -> MetricsRow:
    numbers = np.array([one.values.get(name, np.nan) for name in names], dtype="<f8")
    return MetricsRow(one.step, one.time, numbers.tobytes())
