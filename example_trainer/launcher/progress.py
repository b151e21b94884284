"""The progress of a running launch: `Feed` reads it into a `Snapshot`, from which its phase follows.

A snapshot holds the milestones, the newest steps, and the broker's status; the figures shown of it are in `views`.
Everything is read from outside: health endpoints, the broker's `/v1/status`, and the lines that the trainer
appends to `metrics.jsonl`. One poll costs well under a millisecond, so that watching a run does not slow it down.
"""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atropos_api.client.events import explain_drops, printable
from atropos_api.common import metric_names as names
from atropos_api.common.secrets import TokenSource
from example_trainer.launcher.plan import Plan
from example_trainer.launcher.programs import BROKER, TRAINER, VLLM
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.launcher.teacher import TEACHER
from example_trainer.monitoring.trackers import MetricsTail, read_row
from example_trainer.processes.ports import LOOPBACK
from example_trainer.processes.tree import is_alive

# Environments contact the broker at least every ten seconds.
SILENCE_SECONDS = 60.0
STATUS_INTERVAL_SECONDS = 1.0
READINESS_INTERVAL_SECONDS = 0.25
STALLED_SECONDS = 30.0
KEPT_ROWS = 200
"""Newest steps of a snapshot: a view shows at most 60, and all steps of a run of days would fill the memory."""
KEPT_SIGNS = 1000
"""Newest signs of trouble of a snapshot: a value near its limit may make one every other step."""


class Endpoint:
    """Sends GET requests to one server over one kept connection; no answer is a result with status 0, not an error."""

    def __init__(self, url: str, *, token: TokenSource | None = None) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = connect(parts.hostname or "", parts.port or (443 if secure else 80), timeout=0.5)
        self._prefix = parts.path.rstrip("/")
        self._token = token or TokenSource()

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body; the status is 0 if the server does not answer."""
        status, body = self._ask(path)
        return self._ask(path) if status == http.HTTPStatus.UNAUTHORIZED and self._token.reload() else (status, body)

    def _ask(self, path: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token.value}"} if self._token.value else {}
        try:
            self._connection.request("GET", self._prefix + path, headers=headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, b""

    def get_json(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object at `path`, or None."""
        status, body = self.get(path)
        return read_row(body) if status == 200 else None

    def close(self) -> None:
        self._connection.close()


class RegisteredServer(Endpoint):
    """A server whose address only the broker knows: it answers as healthy once it is registered and has loaded."""

    def __init__(self, server_id: str, broker_url: str, *, token: TokenSource) -> None:
        super().__init__(broker_url, token=token)
        self._server_id = server_id

    def get(self, path: str) -> tuple[int, bytes]:
        status, body = super().get("/v1/servers" if path == "/health" else path)
        if path != "/health" or status != http.HTTPStatus.OK:
            return status, body
        states = {row["server_id"]: row["state"] for row in (read_row(body) or {}).get("servers", ())}
        return (200, b"") if states.get(self._server_id) in {"joining", "serving"} else (0, b"")


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The state of the run as views show it."""

    name: str
    run_dir: Path
    total_steps: int
    started_at: float
    """Unix time at which the command was given."""
    milestones: dict[str, float | None] = field(default_factory=dict)
    """Milestones before the first step: the Unix time at which each was reached, or None."""
    marks: dict[str, float] = field(default_factory=dict)
    """Unix times of other events, for the run's timeline."""
    phase: str = "starting"
    page_url: str = ""
    """Address of the broker's live page; empty before the programs are planned."""
    token_file: Path | None = None
    """File with the token that this page asks for, if the launcher made one."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The newest steps, the last one trained at the end."""
    signs: list[dict[str, Any]] = field(default_factory=list)
    """The newest signs of trouble as the trainer wrote them, in the order of their appearance."""
    signs_forgotten: int = 0
    """Number of the signs before these."""
    status: Mapping[str, Any] = field(default_factory=dict)
    callers: set[str] = field(default_factory=set)
    """Names of the environments that have called the broker since the launch and have not left it."""

    @property
    def elapsed_seconds(self) -> float:
        return time.time() - self.started_at

    @property
    def step(self) -> int:
        return int(self.rows[-1].get("step", len(self.rows))) if self.rows else 0

    @property
    def drops(self) -> list[str]:
        """Reasons why groups do not reach the trainer, as their environments report them, while no step is made."""
        last = self.rows[-1].get("timestamp") if self.rows else None
        if isinstance(last, int | float) and time.time() - last < STALLED_SECONDS:
            return []
        return list(explain_drops(self.status))

    def series(self, name: str) -> list[float]:
        """Return the values of a metric in the newest steps, in their order."""
        return [float(row[name]) for row in self.rows if isinstance(row.get(name), int | float)]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append steps; a trainer that has resumed trains some again, and their first rows are dropped."""
        if rows:
            first = rows[0].get(names.STEP, 0)
            self.rows = [*(row for row in self.rows if row.get(names.STEP, 0) < first), *rows][-KEPT_ROWS:]

    @property
    def sign_count(self) -> int:
        """The number of signs so far."""
        return self.signs_forgotten + len(self.signs)

    def signs_after(self, count: int) -> list[dict[str, Any]]:
        """Return the signs that are known beyond the first `count`."""
        return self.signs[max(0, count - self.signs_forgotten) :]

    def add_signs(self, signs: Sequence[dict[str, Any]]) -> None:
        """Append signs of trouble, and forget the oldest if there are many."""
        self.signs += signs
        left_out = max(0, len(self.signs) - KEPT_SIGNS)
        del self.signs[:left_out]
        self.signs_forgotten += left_out

    def reach(self, milestone: str) -> None:
        if self.milestones.get(milestone, 0.0) is None:
            self.milestones[milestone] = time.time()


class Feed:
    """Fills a snapshot; `poll` is called from the launcher's loop."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        metrics: MetricsTail,
        broker: Endpoint,
        events: MetricsTail | None = None,
        servers: Mapping[str, Sequence[Endpoint]] | None = None,
        knows_run: bool = False,
    ) -> None:
        """`events` reads signs; `servers` has the servers by the milestone that is reached once all of them answer.

        `knows_run` says that the broker may know a run from before this launch, whose trainer is another one.
        """
        self.snapshot = snapshot
        self._metrics = metrics
        self._events = events
        self._broker = broker
        self._servers = servers or {}
        self._starting = {milestone: list(group) for milestone, group in self._servers.items()}
        self._asked_at = 0.0
        self._knows_run = knows_run
        self._owner_before: tuple[Any, Any] | None = None
        self._quiet: dict[str, float] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Query everything that is due; return the rows of the steps trained since the last call."""
        rows = self._metrics.read()
        self.snapshot.add(rows)
        if rows:
            self.snapshot.reach("trainer")
        if self._events is not None:
            self.snapshot.add_signs([row for row in self._events.read() if {"sign", "step"} <= row.keys()])
        now = time.monotonic()
        ready = None not in self.snapshot.milestones.values()
        if now - self._asked_at >= (STATUS_INTERVAL_SECONDS if ready else READINESS_INTERVAL_SECONDS):
            self._asked_at = now
            self._ask()
        return rows

    def read_status(self) -> Mapping[str, Any]:
        """Return the broker's status now, or the last one if it does not answer."""
        return self._broker.get_json("/v1/status") or self.snapshot.status

    def close(self) -> None:
        self._broker.close()
        for server in chain.from_iterable(self._servers.values()):
            server.close()

    def _ask(self) -> None:
        milestones = self.snapshot.milestones
        status = self._broker.get_json("/v1/status")
        if status is not None:
            self.snapshot.status = status
            first = milestones.get("broker", 0.0) is None
            if self._begun(status.get("run"), first=first):
                self.snapshot.reach("trainer")
            self.snapshot.reach("broker")
            self._note_callers(status.get("environments", ()), is_before=first and self._knows_run)
            if self.snapshot.callers:
                self.snapshot.reach("environment")
        for milestone, starting in self._starting.items():
            if milestones.get(milestone, 0.0) is None:
                starting[:] = [server for server in starting if server.get("/health")[0] != 200]
                if not starting:
                    self.snapshot.reach(milestone)

    def _note_callers(self, rows: Sequence[Mapping[str, Any]], *, is_before: bool) -> None:
        """Note which environments call and which leave: the broker lists those of earlier runs, too.

        One has called since the last look if it was silent for longer then. With `is_before` the rows are from
        before this launch, so they only give the times to compare with.
        """
        for row in rows:
            name, quiet = str(row.get("name")), row.get("quiet_seconds")
            if not row.get("connected", True):
                if (quiet or 0.0) <= SILENCE_SECONDS:  # after that it may not have left, only be silent
                    self.snapshot.callers.discard(name)
            elif not is_before and (quiet is None or quiet < self._quiet.get(name, math.inf)):
                self.snapshot.callers.add(name)
            self._quiet[name] = quiet or 0.0

    def _begun(self, run: Mapping[str, Any] | None, *, first: bool) -> bool:
        """Return True if this launch's trainer has begun the run: its owner is not the one seen at the first look."""
        owner = (run.get("run_id"), run.get("epoch")) if run else None
        if self._knows_run and first:
            self._owner_before = owner
        return owner not in {None, self._owner_before}


def make_feed(
    plan: Plan, snapshot: Snapshot, tail: MetricsTail, events: MetricsTail, token: TokenSource, *, resumes: bool
) -> Feed:
    """Return the feed of a launch; servers on nodes whose ports are not known yet are looked up at the broker."""
    known = plan.endpoints.vllm_urls
    servers: dict[str, list[Endpoint]] = {VLLM: [Endpoint(url) for url in known]} if plan.servers else {}
    if plan.servers and not known:  # their nodes choose the ports, so the broker is asked
        broker_url = plan.endpoints.broker_url
        ids = [plan.settings_of(name)[VLLM]["server_id"] for name in plan.servers]
        servers[VLLM] = [RegisteredServer(server_id, broker_url, token=token) for server_id in ids]
    if plan.endpoints.teacher_port is not None:
        servers[TEACHER] = [Endpoint(f"http://{LOOPBACK}:{plan.endpoints.teacher_port}")]
    return Feed(
        snapshot,
        metrics=tail,
        events=events,
        broker=Endpoint(plan.endpoints.broker_url, token=token),
        servers=servers,
        knows_run=resumes or plan.endpoints.broker_port is None,
    )


def milestones_of(plan: Plan) -> list[str]:
    """Return the milestones before the first step: the programs that this launch waits for."""
    servers = [(VLLM, plan.child(VLLM)), (TEACHER, plan.child(TEACHER))]
    wanted = [(BROKER, True), *servers, (TRAINER, True), ("environment", plan.environments)]
    return [name for name, present in wanted if present]


def never_ready(plan: Plan, snapshot: Snapshot) -> set[str]:
    """Return the programs whose milestone has not been reached yet."""
    groups = {VLLM: plan.servers, "environment": plan.environments}
    missing = [name for name, reached_at in snapshot.milestones.items() if reached_at is None]
    return {name for milestone in missing for name in groups.get(milestone, (milestone,))}


def reached(snapshot: Snapshot) -> dict[str, float]:
    """Return the Unix times of the milestones that have been reached."""
    return {name: at for name, at in snapshot.milestones.items() if at is not None}


def phase_of(snapshot: Snapshot, waiting: set[str]) -> str:
    """Return the part of the run that is under way, in words; `waiting` has the programs that must still end."""
    if TRAINER not in waiting:
        return "final evaluation" if waiting else "ending"
    if silent := silent_environments(snapshot):
        return f"silent for over {SILENCE_SECONDS:.0f} s: {', '.join(silent)}"
    if snapshot.rows:
        return "training" if snapshot.step < snapshot.total_steps else "last checkpoint"
    missing = [name for name, reached_at in snapshot.milestones.items() if reached_at is None]
    return f"waiting for {', '.join(missing)}" if missing else "first evaluation and first batch"


def silent_environments(snapshot: Snapshot) -> list[str]:
    """Return the environments of this launch that have not called the broker for long: they run, but may be stuck."""
    known = [entry for entry in snapshot.status.get("environments", ()) if entry.get("name") in snapshot.callers]
    return [printable(str(entry["name"])) for entry in known if (entry.get("quiet_seconds") or 0.0) > SILENCE_SECONDS]


def answered_requests(snapshot: Snapshot) -> int:
    """Return the number of requests that inference servers have answered, as this run's environments report them."""
    known = [entry for entry in snapshot.status.get("environments", ()) if entry.get("name") in snapshot.callers]
    reports = [entry.get("activity") or {} for entry in known]
    return sum(server["requests"] for report in reports for server in report.get("servers", ()))


def note_engine_start(snapshot: Snapshot, supervisor: Supervisor) -> None:
    """Record when the server's imports ended: it starts its engine's process then; the time after is the engine's."""
    if snapshot.milestones.get("vllm") and "imports" not in snapshot.marks and VLLM in supervisor:
        start_times = [process.create_time() for process in supervisor[VLLM].descendants if is_alive(process)]
        if start_times:
            snapshot.marks["imports"] = min(start_times)
