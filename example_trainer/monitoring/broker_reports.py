"""Reports of a run to its broker, for the page: metrics of each step, signs of trouble, phases, and values of tokens.

A thread sends them. Training never waits for it and never fails because of it: while the broker does not answer,
reports are kept up to a limit and sent later. If the broker has no route for reports, no more are sent. The values of
tokens are also written to `trained.jsonl` in the run directory, so that the run can be examined without its broker.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from atropos_api.client import BrokerRefused
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import RecentLines
from atropos_api.wire.groups import Group
from atropos_api.wire.reports import (
    MOST_STEPS_A_REPORT,
    GroupValues,
    HealthSign,
    RunReport,
    StepMetrics,
    TokenReport,
    TrainerActivity,
)
from example_trainer.monitoring.health import HealthEvent
from example_trainer.state import Phases

logger = logging.getLogger(__name__)

TRAINED_FILE: Final = "trained.jsonl"
MOST_WAITING_STEPS: Final = 5000
MOST_WAITING_SIGNS: Final = 100
MOST_WAITING_BATCHES: Final = 4
"""Each keeps the arrays of its batch in memory."""
REPORT_SECONDS: Final = 2.0
"""Interval of reports while phases change, and shortest pause after one that failed."""

LONGEST_PAUSE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
KEPT_LINES: Final = 100_000
MOST_BYTES: Final = 16 << 20
NO_SUCH_ROUTE: Final = frozenset({404, 405})


class ReportClient(Protocol):
    """The calls by which a broker takes reports."""

    def report_run(self, run_id: str, report: RunReport) -> None: ...

    def report_tokens(self, run_id: str, number: int, report: TokenReport) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """The recorded part of a batch: some groups, the trainer's values of them, and the texts of their tokens."""

    number: int
    values: Sequence[GroupValues]
    groups: Sequence[Group]
    """The groups of `values`, in the same order."""
    places: Sequence[int]
    """The index of each of them in the whole batch; `values` has the index in the rank's part of it."""
    texts: Mapping[str, str]
    rank: int = 0
    world_size: int = 1

    def line(self, run_id: str) -> bytes:
        """Return the batch as a line of `trained.jsonl`."""
        groups = [
            {"group": place, "samples": one.samples, "fields": group}
            for place, one, group in zip(self.places, self.values, self.groups, strict=True)
        ]
        return msgspec.json.encode(
            {"number": self.number, "run_id": run_id, "groups": groups, "texts": self.texts}, enc_hook=_as_list
        )


class RunReporter:
    """Sender of one run's reports; it implements `Tracker`, and `begin` starts its thread."""

    def __init__(self, client: ReportClient, *, world_size: int = 1, record: RecentLines | None = None) -> None:
        self.phases = Phases()
        """The parts of the step in progress, which the training loop keeps."""
        self._client = client
        self._record = record
        self._world_size = world_size
        self._run_id, self._epoch = "", 0
        self._steps: deque[StepMetrics] = deque(maxlen=MOST_WAITING_STEPS)
        self._signs: deque[HealthSign] = deque(maxlen=MOST_WAITING_SIGNS)
        self._batches: deque[Callable[[], RecordedBatch | None]] = deque(maxlen=MOST_WAITING_BATCHES)
        self._changed = threading.Condition()
        self._closing = False
        self._refused = False
        """True once the broker has answered that it takes no reports."""
        self._step = 0
        self._thread: threading.Thread | None = None

    def begin(self, run_id: str, epoch: int) -> None:
        """Start the thread that sends the reports of this run."""
        self._run_id, self._epoch = run_id, epoch
        self._thread = threading.Thread(target=self._run, name="broker-reports", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        with self._changed:
            self._step = step
            self._steps.append(StepMetrics(step=step, time=time.time(), values=values))
            self._changed.notify()

    def event(self, event: HealthEvent) -> None:
        sign = HealthSign(
            sign=event.sign,
            step=event.step,
            value=event.value,
            message=event.message[:1000],
            advice=event.advice[:1000],
        )
        with self._changed:
            self._signs.append(sign)
            self._changed.notify()

    def record(self, make: Callable[[], RecordedBatch | None]) -> None:
        """Record a batch, which `make` returns in the thread; if too many wait, the oldest is left out."""
        with self._changed:
            self._batches.append(make)
            self._changed.notify()

    def close(self) -> None:
        """Send the remaining reports for at most 2 seconds; those not accepted by then are missing only on the page."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._record is not None:
            self._record.close()
        self._client.close()

    def _run(self) -> None:
        pause = 0.0
        while not self._closing or self._steps or self._signs or self._batches:
            with self._changed:
                if not (self._steps or self._signs or self._batches) and not self._closing:
                    self._changed.wait(REPORT_SECONDS)
                if pause and not self._closing:
                    self._changed.wait(pause)
            sent = self._send()
            pause = 0.0 if sent else min(LONGEST_PAUSE_SECONDS, max(REPORT_SECONDS, 2 * pause))
            if self._closing and not sent:
                return

    def _send(self) -> bool:
        """Send what is waiting; return False if the broker did not take it and may do so later."""
        with self._changed:
            steps, signs = list(self._steps)[:MOST_STEPS_A_REPORT], list(self._signs)
            make = self._batches.popleft() if self._batches else None
        report = RunReport(epoch=self._epoch, steps=steps, signs=signs, activity=self._activity())
        sent = self._try(lambda: self._client.report_run(self._run_id, report))
        if sent:
            with self._changed:
                self._forget(steps, signs)
        if make is not None:
            self._take_batch(make)
        return sent

    def _take_batch(self, make: Callable[[], RecordedBatch | None]) -> None:
        try:
            batch = make()
            if batch is None:
                return
            if self._record is not None:
                self._record.append(batch.line(self._run_id))
        except Exception as error:  # noqa: BLE001 - tokenizers and disks fail in many ways; none may end the thread
            logger.debug("the values of a batch's tokens are not recorded: %s", error)
            return
        report = TokenReport(
            epoch=self._epoch,
            rank=batch.rank,
            world_size=batch.world_size,
            groups=list(batch.values),
            texts=dict(batch.texts),
        )
        self._try(lambda: self._client.report_tokens(self._run_id, batch.number, report))

    def _try(self, call: Callable[[], None]) -> bool:
        if self._refused:
            return True
        try:
            call()
        except BrokerRefused as error:
            self._refused = error.status in NO_SUCH_ROUTE and error.kind != "unknown-run"
            logger.debug("the broker refused a report: %s", error)
            return not error.is_passing
        except AtroposError as error:
            logger.debug("a report is kept for later: %s", error)
            return False
        return True

    def _forget(self, steps: Sequence[StepMetrics], signs: Sequence[HealthSign]) -> None:
        """Remove what was sent from the queues, which may have got new entries meanwhile in place of the oldest."""
        while self._steps and steps and self._steps[0].step <= steps[-1].step:
            self._steps.popleft()
        for sign in signs:
            if sign in self._signs:
                self._signs.remove(sign)

    def _activity(self) -> TrainerActivity:
        return TrainerActivity(
            step=self.phases.step or self._step,
            phases=self.phases.seconds(),
            host=socket.gethostname()[:200],
            pid=os.getpid(),
            world_size=self._world_size,
        )


def _as_list(value: Any) -> Any:
    """Return rows that came as numpy arrays as lists."""
    return value.tolist()
