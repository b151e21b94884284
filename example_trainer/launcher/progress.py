"""The progress of a running launch: `Feed` reads it into a `Snapshot`, and a `View` shows it.

A snapshot holds the milestones, the steps trained so far, and the broker's status. Everything is read from outside:
health endpoints, the broker's `/v1/status`, and the lines that the trainer appends to `metrics.jsonl`. One poll costs
well under a millisecond, so that watching a run does not slow it down. The view is a live panel on a terminal;
elsewhere it is one plain line for each milestone, step and sign of trouble, or a JSON object with `--json`.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atropos_api.client.events import count_drops, explain_drops, explain_wait
from atropos_api.common import metric_names as names
from atropos_api.common.secrets import TokenSource
from example_trainer.monitoring.trackers import MetricsTail, read_row

STATUS_INTERVAL_SECONDS = 1.0
READINESS_INTERVAL_SECONDS = 0.25
STALLED_SECONDS = 30.0


class Endpoint:
    """Sends GET requests to one server over one kept connection; no answer is a result with status 0, not an error."""

    def __init__(self, url: str, *, token: TokenSource | None = None, timeout_seconds: float = 0.5) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = connect(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout_seconds)
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
    rows: list[dict[str, Any]] = field(default_factory=list)
    signs: list[dict[str, Any]] = field(default_factory=list)
    """Signs of trouble as the trainer wrote them, in the order of their appearance."""
    status: Mapping[str, Any] = field(default_factory=dict)

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
        """Return all values of a metric so far, in the order of the steps."""
        return [float(row[name]) for row in self.rows if isinstance(row.get(name), int | float)]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append steps; a trainer that has resumed trains some again, and their first rows are dropped."""
        if rows:
            first = rows[0].get(names.STEP, 0)
            self.rows = [*(row for row in self.rows if row.get(names.STEP, 0) < first), *rows]

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
    ) -> None:
        """`events` reads signs; `servers` has the servers by the milestone that is reached once all of them answer."""
        self.snapshot = snapshot
        self._metrics = metrics
        self._events = events
        self._broker = broker
        self._servers = servers or {}
        self._starting = {milestone: list(group) for milestone, group in self._servers.items()}
        self._asked_at = 0.0

    def poll(self) -> list[dict[str, Any]]:
        """Query everything that is due; return the rows of the steps trained since the last call."""
        rows = self._metrics.read()
        self.snapshot.add(rows)
        if rows:
            self.snapshot.reach("trainer")
        if self._events is not None:
            self.snapshot.signs += [row for row in self._events.read() if {"sign", "step"} <= row.keys()]
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
            self.snapshot.reach("broker")
            if status.get("run"):
                self.snapshot.reach("trainer")
            if status.get("environments"):
                self.snapshot.reach("environment")
        for milestone, starting in self._starting.items():
            if milestones.get(milestone, 0.0) is None:
                starting[:] = [server for server in starting if server.get("/health")[0] != 200]
                if not starting:
                    self.snapshot.reach(milestone)


REFRESH_INTERVAL_SECONDS = 0.5
DROPS_INTERVAL_SECONDS = 30.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
SHOWN_SIGNS = 3


class View(Protocol):
    """Shows a snapshot until it is closed."""

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        """Show the snapshot; called often, with the rows of the steps trained since the last call."""

    def close(self) -> None: ...


def make_view(choice: str, out: IO[str] | None = None) -> View:
    """Make the view for `live`, `plain`, `json`, `quiet`, or `auto`: live if `out` is a terminal, and else plain."""
    out = out or sys.stdout
    if choice in {"json", "quiet"}:
        return JsonView(out) if choice == "json" else QuietView()
    live = choice == "live" or (choice == "auto" and out.isatty())
    return LiveView(Console(file=out)) if live else PlainView(out)


class QuietView:
    """Shows nothing."""

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class JsonView:
    """Writes one JSON object a line; `event` tells its kind: milestone, page, phase, step, health or dropped.

    Steps and signs of trouble are the lines of `metrics.jsonl` and `events.jsonl`.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._reached: set[str] = set()
        self._signs = 0
        self._last: dict[str, Any] = {"page": "", "phase": "", "dropped": []}

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        for name, reached_at in snapshot.milestones.items():
            if reached_at is not None and name not in self._reached:
                self._reached.add(name)
                self._line("milestone", name=name, timestamp=reached_at)
        self._if_new("page", snapshot.page_url)
        for row in rows:
            self._line("step", **row)
        for sign in snapshot.signs[self._signs :]:
            self._line(**{"event": "health", **sign})
        self._signs = len(snapshot.signs)
        self._if_new("phase", snapshot.phase)
        self._if_new("dropped", snapshot.drops)

    def close(self) -> None:
        self._out.flush()

    def _if_new(self, event: str, value: Any) -> None:
        if value != self._last[event]:
            self._last[event] = value
            self._line(event, **{event: value}, timestamp=time.time())

    def _line(self, event: str, **content: Any) -> None:
        self._out.write(json.dumps({"event": event, **content}) + "\n")
        self._out.flush()


class PlainView:
    """Writes lines for a log file: each milestone, step and sign of trouble once."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown: set[str] = set()
        self._page_url = ""
        self._phase = ""
        self._signs = 0
        self._drops: list[str] = []
        self._drops_shown_at = float("-inf")

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        for name, reached_at in snapshot.milestones.items():
            if reached_at is not None and name not in self._shown:
                self._shown.add(name)
                self._line(reached_at - snapshot.started_at, f"{name} ready")
        if snapshot.page_url != self._page_url:
            self._page_url = snapshot.page_url
            self._line(snapshot.elapsed_seconds, f"page for a browser: {snapshot.page_url}")
        for row in rows:
            at = float(row.get("timestamp", time.time())) - snapshot.started_at
            self._line(at, step_line(row, snapshot))
        for sign in snapshot.signs[self._signs :]:
            self._line(snapshot.elapsed_seconds, sign_line(sign))
        self._signs = len(snapshot.signs)
        if snapshot.phase != self._phase:
            self._phase = snapshot.phase
            self._line(snapshot.elapsed_seconds, snapshot.phase)
        self._print_drops(snapshot)

    def _print_drops(self, snapshot: Snapshot) -> None:
        """Print why no groups arrive when the reason has changed, at most every `DROPS_INTERVAL_SECONDS`."""
        drops, now = snapshot.drops, time.monotonic()
        if drops and drops != self._drops and now - self._drops_shown_at >= DROPS_INTERVAL_SECONDS:
            self._drops, self._drops_shown_at = drops, now
            for line in drops:
                self._line(snapshot.elapsed_seconds, line)

    def close(self) -> None:
        self._out.flush()

    def _line(self, at_seconds: float, text: str) -> None:
        self._out.write(f"{at_seconds:7.1f} s  {text}\n")
        self._out.flush()


class LiveView:
    """Redraws a panel in place: after each step, and otherwise at most twice a second."""

    def __init__(self, console: Console) -> None:
        # Without rich's refresh thread, because the launcher forks; `update` redraws.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn_at = 0.0

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        now = time.monotonic()
        if rows or now - self._drawn_at >= REFRESH_INTERVAL_SECONDS:
            self._drawn_at = now
            self._live.start()  # which does nothing the second time
            self._live.update(render(snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render(snapshot: Snapshot) -> RenderableType:
    """Render the whole view of the snapshot."""
    head = Text.assemble(
        (snapshot.name, "bold"), f"  {snapshot.run_dir}  ", (f"{snapshot.elapsed_seconds:.0f} s", "dim")
    )
    if snapshot.page_url:
        head.append(f"  {snapshot.page_url}", style="dim")
    drops = [Text(line, style="yellow") for line in snapshot.drops]
    if not snapshot.rows:
        return Group(head, _milestones(snapshot), *drops)
    found = explain_wait(snapshot.status)
    waits = [Text(found, style="yellow")] if found else []
    signs = [Text(sign_line(sign), style="yellow") for sign in snapshot.signs[-SHOWN_SIGNS:]]
    return Group(head, _milestones(snapshot), *_steps(snapshot), *waits, *drops, *signs)


def step_line(row: dict[str, Any], snapshot: Snapshot) -> str:
    """Return one step as one line; figures that the trainer did not report are left out."""
    parts = [f"step {row.get(names.STEP, '?')}/{snapshot.total_steps}"]
    parts += [f"{label} {value}" for label, value in figures(row, snapshot)]
    return "  ".join(parts)


def sign_line(sign: Mapping[str, Any]) -> str:
    """Return a sign of trouble as one line, with its advice."""
    return f"sign of trouble at step {sign['step']}: {sign.get('message', sign['sign'])}; {sign.get('advice', '')}"


def figures(row: dict[str, Any], snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return label and text of each figure that the view shows for a step."""
    wanted = (
        ("reward", names.REWARD_MEAN, "{:.3f}"),
        ("length", names.RESPONSE_LENGTH_MEAN, "{:.1f}"),
        ("tokens/s", names.TOKENS_PER_SECOND, "{:,.0f}"),
        ("staleness", names.STALENESS_MEAN, "{:.1f}"),
        ("sync", names.TIME_SYNC, "{:.2f} s"),
        ("step", names.TIME_STEP, "{:.2f} s"),
    )
    shown = [(label, form.format(row[key])) for label, key, form in wanted if isinstance(row.get(key), int | float)]
    queued, dropped = queued_sequences(snapshot), count_drops(snapshot.status)
    shown += [] if queued is None else [("queue", str(queued))]
    return [*shown, ("dropped", str(dropped))] if dropped else shown


def queued_sequences(snapshot: Snapshot) -> int | None:
    """Return the number of sequences queued at the broker, from its last status."""
    queue = snapshot.status.get("queue")
    value = queue.get("sequences") if isinstance(queue, dict) else queue
    return value if isinstance(value, int) else None


def sparkline(values: Sequence[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """Draw the newest values as bars between `low` and `high`, which are widened to include all of them."""
    recent = values[-SPARKLINE_WIDTH:]
    if not recent:
        return ""
    low, high = min(low, *recent, low), max(high, *recent, high)
    scale = (len(SPARKS) - 1) / ((high - low) or 1.0)
    return "".join(SPARKS[round((value - low) * scale)] for value in recent)


def _milestones(snapshot: Snapshot) -> Text:
    line = Text()
    for name, reached_at in snapshot.milestones.items():
        state = "starting" if reached_at is None else f"{reached_at - snapshot.started_at:.1f} s"
        line.append(f"{name} ", style="dim" if reached_at is None else "green")
        line.append(f"{state}  ", style="dim")
    line.append(snapshot.phase, style="italic")
    return line


def _steps(snapshot: Snapshot) -> list[RenderableType]:
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        f"step {snapshot.step}/{snapshot.total_steps}",
        ProgressBar(total=snapshot.total_steps, completed=snapshot.step, width=40),
    )
    rewards = Text.assemble(("reward ", "dim"), sparkline(snapshot.series(names.REWARD_MEAN)))
    figure_line = Text("   ").join(
        Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in figures(snapshot.rows[-1], snapshot)
    )
    return [bar, rewards, figure_line]
