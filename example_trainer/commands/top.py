"""`atropos top URL` shows a broker's status: a live panel on a terminal, plain lines elsewhere, once or as JSON for
scripts.

The status is rendered as lines of name and value, and as the panel.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atropos_api.client import BrokerHostUnknown, BrokerRefused, BrokerUnreachable, ServerEvent, watch_events
from atropos_api.client.events import count_drops, explain_drops, explain_wait, printable
from atropos_api.common.cliconfig import ConfigError, load_config, refuse_unknown_option
from atropos_api.common.identity import require_address
from atropos_api.common.option_flags import list_options
from atropos_api.common.secrets import SECRET, TokenSource
from atropos_api.common.streams import can_redraw
from example_trainer.launcher.views import sparkline

SHOWN_ENVIRONMENTS: Final = 12

COUNTED: Final = (
    ("received", "groups_received_total"),
    ("expired", "groups_expired_total"),
    ("refused", "groups_refused_total"),
    ("unpackable", "groups_unpackable_total"),
    ("duplicates", "groups_duplicate_total"),
    ("lost", "groups_lost_total"),
)


def describe(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the state as pairs of name and value; no name contains a space."""
    run = status.get("run")
    if run is None:
        yield "run", "none"
    else:
        yield "run", _plain(run["name"])
        yield "state", str(run["state"])
        yield "step", f"{run['current_step']}/{run['num_steps'] or '-'}"
        yield "policy", _or_dash(run["policy_version"])
        yield "next_batch", str(run["next_batch"])
    queue = status.get("queue", {})
    yield "queued_groups", str(queue.get("groups", 0))
    yield "queued_sequences", str(queue.get("sequences", 0))
    oldest = queue.get("oldest_age_seconds")
    yield "oldest_seconds", _or_dash(None if oldest is None else round(oldest))
    yield "uncommitted_batches", str(len(status.get("batches", {}).get("uncommitted", {})))
    environments = status.get("environments", [])
    yield "environments", f"{sum(bool(one['connected']) for one in environments)}/{len(environments)}"
    for name, servers in describe_fleets(status):
        yield name, servers
    if dropped := count_drops(status):
        yield "dropped", str(dropped)
    if found := explain_wait(status):
        yield "diagnosis", found
    for name, counter in COUNTED:
        count = status.get("counters", {}).get(counter, 0)
        if count or name == "received":
            yield name, str(count)


def describe_fleets(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how many servers of all launchers run and are wanted, and the reasons if these numbers differ."""
    fleets = status.get("fleets", [])
    if fleets:
        yield "servers", f"{sum(one['running'] for one in fleets)}/{sum(one['wanted'] for one in fleets)}"
    if notes := [one["note"] for one in fleets if one["note"]]:
        yield "servers_note", _plain("; ".join(notes))


def step_of(status: Mapping[str, Any]) -> int | None:
    run = status.get("run")
    return None if run is None else int(run["current_step"])


def describe_event(event: ServerEvent) -> str:
    """Return an event as one line: its type, and its data as name=value."""
    pairs = (f"{name}={_plain(value)}" for name, value in event.data.items() if name != "time")
    return "  ".join((event.type, *pairs))


def render(
    url: str,
    status: Mapping[str, Any],
    *,
    events: Iterable[ServerEvent],
    rates: Sequence[float],
    lost: str,
) -> RenderableType:
    """Render the whole panel."""
    run = status.get("run") or {}
    head = Text.assemble((_plain(run.get("name", "no run")), "bold"), f"  {url}  ", (lost and f"lost: {lost}", "red"))
    parts: list[RenderableType] = [head]
    if run.get("num_steps"):
        bar = Table.grid(padding=(0, 2))
        step, steps = run["current_step"], run["num_steps"]
        bar.add_row(f"step {step}/{steps}", ProgressBar(total=steps, completed=min(step, steps), width=40))
        parts.append(bar)
    if found := explain_wait(status):
        parts.append(Text(found, style="yellow"))
    shown = ((name, value) for name, value in describe(status) if name != "diagnosis")
    figures = (Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in shown)
    parts.append(Text("  ").join(figures))
    if rates:
        spark = sparkline(list(rates), high=max(rates) or 1.0)
        parts.append(Text.assemble(("sequences/s ", "dim"), spark, f"  {rates[-1]:,.0f}"))
    if status.get("environments"):
        parts.append(_environments(status["environments"]))
    parts += [Text(line, style="yellow") for line in explain_drops(status)]
    parts += [Text(describe_event(event), style="dim", overflow="ellipsis", no_wrap=True) for event in events]
    return Group(*parts)


def _environments(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("environment", "group size", "weight", "queued", "quiet"):
        table.add_column(title, justify="left" if title == "environment" else "right")
    latest = sorted(rows, key=lambda row: float(row["quiet_seconds"]))
    for row in latest[:SHOWN_ENVIRONMENTS]:
        values = (f"{row['group_size']}", f"{row['weight']:g}", f"{row['queued_sequences']}")
        style = "" if row["connected"] else "dim"
        # As text: a name may hold what rich would read as markup.
        table.add_row(Text(_plain(row["name"])), *values, f"{row['quiet_seconds']:.0f} s", style=style)
    if len(rows) > SHOWN_ENVIRONMENTS:
        table.add_row(f"and {len(rows) - SHOWN_ENVIRONMENTS} more")
    return table


def _plain(value: object) -> str:
    """Return `value` as text that stays on one line and sets no terminal colours."""
    return printable(value if isinstance(value, str) else json.dumps(value))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


DESCRIPTION: Final = "Watch a broker: atropos top URL, where URL is that of run-api, such as http://127.0.0.1:8000."
RECONNECT_SECONDS: Final = 1.0
PLAIN_INTERVAL_SECONDS: Final = 10.0
KEPT_EVENTS: Final = 8
KEPT_RATES: Final = 60
TRUTH_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n"})
"""Values that an option of type bool takes."""


class TopConfig(BaseModel):
    """The options in addition to the URL."""

    model_config = ConfigDict(extra="forbid")

    token: str | None = Field(
        None, description="Bearer token of the broker; default: $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    token_file: Path | None = Field(
        None, description="File with that token, read again if the broker refuses it; default: $ATROPOS_TOKEN_FILE."
    )
    once: bool = Field(False, description="Print the state as lines of name and value, and exit.")
    format: Literal["text", "json"] = Field(
        "text",
        description="Form of the output: text, or the whole status as a JSON object a line, each time it changes and "
        "about every 15 seconds.",
    )


@dataclass(kw_only=True, slots=True)
class BrokerSnapshot:
    """The last known state of the watched broker."""

    url: str
    status: Mapping[str, Any] = field(default_factory=dict)
    last_id: int | None = None
    lost_because: str = ""
    """Reason for the lost connection; empty while connected."""
    events: deque[ServerEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_RATES))
    """Sequences received per second, from one status to the next."""

    def take(self, event: ServerEvent) -> None:
        self.last_id = event.id if event.id is not None else self.last_id
        if event.type != "status":
            self.events.append(event)
            return
        seconds = event.data.get("time", 0.0) - self.status.get("time", 0.0)
        arrived = _received(event.data) - _received(self.status)
        # A broker that was restarted counts from the beginning.
        if self.status and seconds > 0 and arrived >= 0:
            self.rates.append(arrived / seconds)
        self.status = event.data


class View(Protocol):
    """Shows the broker's state and events until it is closed."""

    def update(self, snapshot: BrokerSnapshot, event: ServerEvent | None) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """Writes a line for each event, and one for the state at each new step and about every ten seconds."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown_at = float("-inf")
        self._step: int | None = None

    def update(self, snapshot: BrokerSnapshot, event: ServerEvent | None) -> None:
        if event is None:
            self._line(f"no answer from {snapshot.url}, trying again ({snapshot.lost_because})")
        elif event.type != "status":
            self._line(describe_event(event))
        elif step_of(snapshot.status) != self._step or time.monotonic() - self._shown_at >= PLAIN_INTERVAL_SECONDS:
            self._step, self._shown_at = step_of(snapshot.status), time.monotonic()
            self._line("  ".join(f"{name} {value}" for name, value in describe(snapshot.status)))

    def close(self) -> None:
        self._out.flush()

    def _line(self, text: str) -> None:
        self._out.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        self._out.flush()


class JsonView:
    """Writes each status as a line of JSON, and nothing else."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def update(self, snapshot: BrokerSnapshot, event: ServerEvent | None) -> None:
        if event is not None and event.type == "status":
            self._out.write(f"{json.dumps(snapshot.status)}\n")
            self._out.flush()

    def close(self) -> None:
        self._out.flush()


class LiveView:
    """Redraws a panel in place at each status, and when the connection is lost."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def update(self, snapshot: BrokerSnapshot, event: ServerEvent | None) -> None:
        if event is None or event.type == "status":
            panel = render(
                snapshot.url, snapshot.status, events=snapshot.events, rates=snapshot.rates, lost=snapshot.lost_because
            )
            self._live.update(panel, refresh=True)

    def close(self) -> None:
        self._live.stop()


def run(arguments: Sequence[str], out: IO[str] = sys.stdout) -> int:
    """Watch the broker until the output is closed, or print its state once."""
    url, rest = take_url(arguments)
    config = load_config(TopConfig, rest, prog="atropos top URL", description=DESCRIPTION)
    token = TokenSource.settle(config.token, config.token_file, os.environ)
    snapshot = BrokerSnapshot(url=url)
    try:
        if config.once:
            return print_once(snapshot, token, out, as_json=config.format == "json")
        return follow(snapshot, token, make_view(config.format, out))
    except BrokenPipeError:
        # The reader of the lines has closed the pipe; the flush at exit must not fail on it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_view(form: Literal["text", "json"], out: IO[str]) -> View:
    if form == "json":
        return JsonView(out)
    return LiveView(Console(file=out)) if can_redraw(out) else PlainView(out)


def take_url(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one argument that is an address, with a scheme, and the other arguments."""
    if {"-h", "--help"} & set(arguments):
        return "", list(arguments)
    values = set(_places_of_values(arguments))
    places = [index for index, argument in enumerate(arguments) if not argument.startswith("-") and index not in values]
    if len(places) != 1:
        known = {flag for option in list_options(TopConfig) for flag in option.flags}
        refuse_unknown_option(TopConfig, [word for word in arguments if word.partition("=")[0] not in known])
        raise ConfigError(f"atropos top takes one URL, such as http://127.0.0.1:8000; got {len(places)}")
    given = arguments[places[0]]
    rest = [argument for index, argument in enumerate(arguments) if index != places[0]]
    try:
        return require_address(given if "://" in given else f"http://{given}").rstrip("/"), rest
    except ValueError as error:
        raise ConfigError(f"atropos top {given}: {error}") from None


def _places_of_values(arguments: Sequence[str]) -> Iterator[int]:
    """Yield the positions of options' values; an option of type bool takes one only if it is in `TRUTH_WORDS`."""
    kinds = {flag: option.kind for option in list_options(TopConfig) for flag in option.flags}
    for index, (argument, following) in enumerate(pairwise([*arguments, ""]), 1):
        kind = kinds.get(argument)
        if kind is not None and (kind != "bool" or following.lower() in TRUTH_WORDS):
            yield index


def print_once(snapshot: BrokerSnapshot, token: TokenSource, out: IO[str], *, as_json: bool = False) -> int:
    for event in _listen(snapshot, token):
        if event is not None:
            snapshot.take(event)
        if snapshot.status:
            break
    if as_json:
        out.write(f"{json.dumps(snapshot.status)}\n")
        return 0
    for name, value in describe(snapshot.status):
        out.write(f"{name} {value}\n")
    return 0


def follow(snapshot: BrokerSnapshot, token: TokenSource, view: View) -> int:
    """Show all events; a broker that never answered is an error, one that was lost is waited for."""
    try:
        for event in _listen(snapshot, token):
            if event is not None:
                snapshot.lost_because = ""
                snapshot.take(event)
            view.update(snapshot, event)
    finally:
        view.close()
    return 0


def _listen(snapshot: BrokerSnapshot, token: TokenSource) -> Iterator[ServerEvent | None]:
    """Yield events over as many connections as needed; None each time that one is lost or cannot be made."""
    while True:
        try:
            yield from watch_events(snapshot.url, token=token, after=snapshot.last_id)
            snapshot.lost_because = "it closed the connection"
        except BrokerUnreachable as error:
            if not snapshot.status:
                raise ConfigError(_no_broker(snapshot.url, error)) from error
            snapshot.lost_because = str(error.__cause__ or error)
        except (BrokerHostUnknown, BrokerRefused) as error:
            if not snapshot.status or (isinstance(error, BrokerRefused) and not error.is_passing):
                raise
            # The name was right, so this is an outage; a proxy answers 502 while the broker behind it restarts.
            snapshot.lost_because = str(error.__cause__ or error)
        yield None
        time.sleep(RECONNECT_SECONDS)


def _no_broker(url: str, error: BrokerUnreachable) -> str:
    return f"no broker answers at {url} ({error.__cause__}); start one with run-api, or check host and port"


def _received(status: Mapping[str, Any]) -> int:
    return int(status.get("counters", {}).get("sequences_received_total", 0))
