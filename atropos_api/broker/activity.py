"""The activity of a run's parts: the reports they sent, the waits of the trainer that the broker sees, and rates.

Training does not need it and it is not stored: after a restart of the broker it is known again within seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from atropos_api.wire.reports import EnvironmentActivity, TrainerActivity

ReportT = TypeVar("ReportT")

BETWEEN_REQUESTS_SECONDS: Final = 3.0
"""Requests for the same thing that are no further apart than this are one wait: Atropos' trainers poll each second."""

RATE_SECONDS: Final = 30.0
SAMPLE_SECONDS: Final = 1.0
FORGET_SECONDS: Final = 900.0
"""Reports older than this are left out: their process ended long ago."""


@dataclass(slots=True)
class Wait:
    """A wait of the trainer for one thing; requests that follow each other closely are one wait."""

    number: int = -1
    """The number of the batch that is waited for."""
    since: float | None = None
    seen_at: float = 0.0
    open_requests: int = 0

    def note(self, now: float, number: int = 0) -> None:
        """Record that the thing was asked for and is not there yet."""
        if number != self.number or not self.lasts(now):
            self.number, self.since = number, now
        self.seen_at = now

    def end(self) -> None:
        self.since = None

    def lasts(self, now: float) -> bool:
        if self.since is None:
            return False
        return self.open_requests > 0 or now - self.seen_at <= BETWEEN_REQUESTS_SECONDS

    @contextmanager
    def request(self, clock: Callable[[], float]) -> Iterator[None]:
        """Count a request that waits inside the block; a request soon after it continues the same wait."""
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            self.seen_at = clock()

    def seconds(self, now: float) -> float | None:
        """Return the time waited so far, or None if there is no wait."""
        return now - self.since if self.since is not None and self.lasts(now) else None


class Report(NamedTuple, Generic[ReportT]):
    """A report and the time at which it came."""

    content: ReportT
    at: float


class Totals(NamedTuple):
    """Counts that only rise, at one moment; their differences give rates."""

    time: float
    requests: float = 0.0
    groups: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    batches: float = 0.0
    steps: float = 0.0
    publishes: float = 0.0

    def since(self, earlier: Totals) -> Totals:
        """Return the rates per second since `earlier`; a count that fell belongs to a new process and gives 0."""
        seconds = max(self.time - earlier.time, 1e-3)
        rates = (max(0.0, now - before) / seconds for now, before in zip(self[1:], earlier[1:], strict=True))
        return Totals(seconds, *rates)


@dataclass(slots=True)
class Activity:
    """The activity of all parts, as far as the broker knows it."""

    environments: dict[int, Report[EnvironmentActivity]] = field(default_factory=dict)
    """The newest report of each environment, by its id."""
    trainers: dict[str, Report[TrainerActivity]] = field(default_factory=dict)
    """The newest report of each run's trainer, by the run's id."""
    steps: dict[str, float] = field(default_factory=dict)
    """The time at which the newest step of each run's trainer was reported."""
    batch_wait: Wait = field(default_factory=Wait)
    publish_wait: Wait = field(default_factory=Wait)
    """The trainer's wait for evaluations to release the policy."""
    process_began_at: float = 0.0
    published_run: str | None = None
    """The run whose trainer published last in this process."""
    collected_run: str | None = None
    """The run that was open when the newest group came to this process."""
    _samples: deque[Totals] = field(default_factory=deque)

    def note_environment(self, environment_id: int, report: EnvironmentActivity, now: float) -> None:
        self.environments[environment_id] = Report(report, now)

    def note_trainer(self, run_id: str, report: TrainerActivity, now: float) -> None:
        self.trainers = {known: one for known, one in self.trainers.items() if now - one.at < FORGET_SECONDS}
        self.trainers[run_id] = Report(report, now)

    def note_step(self, run_id: str, now: float) -> None:
        self.steps = {known: at for known, at in self.steps.items() if now - at < FORGET_SECONDS} | {run_id: now}

    def seconds_since_step(self, run_id: str, now: float) -> float | None:
        return max(0.0, now - self.steps[run_id]) if run_id in self.steps else None

    def note_hold(self, now: float, *, held: bool) -> None:
        """Record that the trainer asked if it may publish, and what it was told."""
        if held:
            self.publish_wait.note(now)
        else:
            self.publish_wait.end()

    def requests(self) -> float:
        """Return the requests that inference servers have answered, over all environments that report them."""
        return float(sum(server.requests for one in self.environments.values() for server in one.content.servers))

    def rates(self, totals: Totals) -> Totals | None:
        """Return the rates per second over the last half minute; None until two samples are a second apart."""
        samples = self._samples
        if len(samples) > 1 and samples[-1].time - samples[-2].time < RATE_SECONDS <= totals.time - samples[-1].time:
            samples.clear()  # nobody has asked for long, perhaps a night; a mean over that time is not the present rate
        if not samples or totals.time - samples[-1].time >= SAMPLE_SECONDS or totals.time < samples[-1].time:
            samples.append(totals)
        while len(samples) > 1:
            # A caller that asks rarely gets the mean since its last call; the next one that asks often does not.
            was_watched = samples[1].time - samples[0].time < RATE_SECONDS
            if totals.time - samples[1].time < (RATE_SECONDS if was_watched else SAMPLE_SECONDS):
                break
            samples.popleft()
        return totals.since(samples[0]) if totals.time - samples[0].time >= SAMPLE_SECONDS else None
