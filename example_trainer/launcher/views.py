"""The views of a running launch: a live panel on a terminal, plain lines elsewhere, JSON objects, or nothing.

Each shows the same `Snapshot` of the run's progress: milestones, steps, signs of trouble and reasons for waiting.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atropos_api.client.events import count_drops, explain_wait
from atropos_api.common import metric_names as names
from atropos_api.common.streams import can_redraw, discard_output
from example_trainer.launcher.progress import Snapshot

REFRESH_INTERVAL_SECONDS = 0.5
DROPS_INTERVAL_SECONDS = 30.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
SHOWN_SIGNS = 3
MOST_HELD_ROWS = 5000
"""Steps that wait for an output which nobody reads, as that of a pager: those of days would fill the memory."""


class View(Protocol):
    """Shows a snapshot until it is closed."""

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        """Show the snapshot; called often, with the rows of the steps trained since the last call."""

    def close(self) -> None: ...


def make_view(choice: str, out: IO[str] | None = None) -> View:
    """Make the view for `live`, `plain`, `json`, `quiet`, or `auto`: live on a terminal that can redraw, else plain."""
    out = out or sys.stdout
    if choice in {"json", "quiet"}:
        return JsonView(out) if choice == "json" else QuietView()
    live = choice == "live" or (choice == "auto" and can_redraw(out))
    return LiveView(Console(file=out)) if live else PlainView(out)


class LastingView:
    """Shows what another view shows, as long as the output can be written.

    A closed pipe or a full disk does not end the run. A pipe that nobody reads, or a terminal that Ctrl-S has stopped,
    does not block it: a launcher that waits to write would restart no program and obey no signal. If too many steps
    wait, the oldest are not shown.
    """

    def __init__(self, view: View, out: IO[str] | None = None) -> None:
        self._view = view
        self._out = out or sys.stdout
        self._held: deque[dict[str, Any]] = deque(maxlen=MOST_HELD_ROWS)

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None:
        self._held.extend(rows)
        with self._forgiving(snapshot):
            # A pipe that can be written has room for 4 KiB, which is enough for a few rows only.
            while self._can_write():
                self._view.update(snapshot, [self._held.popleft()] if self._held else [])
                if not self._held:
                    break

    def close(self) -> None:
        with self._forgiving():
            if self._can_write():
                self._view.close()

    def _can_write(self) -> bool:
        try:
            return bool(select.select([], [self._out.fileno()], [], 0)[1])
        except ValueError:  # a stream that is not a file
            return True

    @contextmanager
    def _forgiving(self, snapshot: Snapshot | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._view = QuietView()
            discard_output(self._out)
            where = "" if snapshot is None else f" in {snapshot.run_dir}"
            with suppress(OSError):
                sys.stderr.write(f"the output cannot be written ({error.strerror}); the run goes on{where}\n")


class QuietView:
    """Shows nothing."""

    def update(self, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class JsonView:
    """Writes one JSON object a line; `event` is its kind: milestone, page, phase, step, health or dropped.

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
        for sign in snapshot.signs_after(self._signs):
            self._line(**{"event": "health", **sign})
        self._signs = snapshot.sign_count
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
            self._line(snapshot.elapsed_seconds, f"page for a browser: {_page(snapshot)}")
        for row in rows:
            at = float(row.get("timestamp", time.time())) - snapshot.started_at
            self._line(at, step_line(row, snapshot))
        for sign in snapshot.signs_after(self._signs):
            self._line(snapshot.elapsed_seconds, sign_line(sign))
        self._signs = snapshot.sign_count
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
            self._live.start()  # does nothing if it has been called before
            self._live.update(render(snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render(snapshot: Snapshot) -> RenderableType:
    """Render the whole view of the snapshot."""
    head = Text.assemble(
        (snapshot.name, "bold"), f"  {snapshot.run_dir}  ", (f"{snapshot.elapsed_seconds:.0f} s", "dim")
    )
    if snapshot.page_url:
        head.append(f"  {_page(snapshot)}", style="dim")
    drops = [Text(line, style="yellow") for line in snapshot.drops]
    if not snapshot.rows:
        return Group(head, _milestones(snapshot), *drops)
    found = explain_wait(snapshot.status)
    waits = [Text(found, style="yellow")] if found else []
    signs = [Text(sign_line(sign), style="yellow") for sign in snapshot.signs[-SHOWN_SIGNS:]]
    return Group(head, _milestones(snapshot), *_steps(snapshot), *waits, *drops, *signs)


def _page(snapshot: Snapshot) -> str:
    token = f" (its token is in {snapshot.token_file})" if snapshot.token_file is not None else ""
    return f"{snapshot.page_url}{token}"


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


def sparkline(values: Sequence[float], *, high: float = 1.0) -> str:
    """Draw the newest values as bars between 0 and `high`, or wider limits that include all of them."""
    recent = values[-SPARKLINE_WIDTH:]
    if not recent:
        return ""
    low, high = min(0.0, *recent), max(high, *recent)
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
