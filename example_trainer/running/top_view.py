"""A broker's status in words and figures: lines of name and value, and the panel of `atropos top`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atropos_api.client import ServerEvent
from atropos_api.common.dropped import count_drops, explain_drops
from example_trainer.running.progress import sparkline

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
    """The state as names and values without spaces in the names."""
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
    if dropped := count_drops(status):
        yield "dropped", str(dropped)
    for name, counter in COUNTED:
        count = status.get("counters", {}).get(counter, 0)
        if count or name == "received":
            yield name, str(count)


def step_of(status: Mapping[str, Any]) -> int | None:
    run = status.get("run")
    return None if run is None else int(run["current_step"])


def describe_event(event: ServerEvent) -> str:
    """An event in one line: its type, and what it says as name=value."""
    said = (f"{name}={_plain(value)}" for name, value in event.data.items() if name != "time")
    return "  ".join((event.type, *said))


def render(
    url: str,
    status: Mapping[str, Any],
    *,
    events: Iterable[ServerEvent],
    rates: Sequence[float],
    lost: str,
) -> RenderableType:
    """The whole panel."""
    run = status.get("run") or {}
    head = Text.assemble((_plain(run.get("name", "no run")), "bold"), f"  {url}  ", (lost and f"lost: {lost}", "red"))
    parts: list[RenderableType] = [head]
    if run.get("num_steps"):
        bar = Table.grid(padding=(0, 2))
        step, steps = run["current_step"], run["num_steps"]
        bar.add_row(f"step {step}/{steps}", ProgressBar(total=steps, completed=min(step, steps), width=40))
        parts.append(bar)
    figures = (Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in describe(status))
    parts.append(Text("  ").join(figures))
    if rates:
        spark = sparkline(list(rates), high=max(rates) or 1.0)
        parts.append(Text.assemble(("sequences/s ", "dim"), spark, f"  {rates[-1]:,.0f}"))
    if status.get("environments"):
        parts.append(_environments(status["environments"]))
    parts += [Text(_plain(line), style="yellow") for line in explain_drops(status)]
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
        table.add_row(Text(str(row["name"])), *values, f"{row['quiet_seconds']:.0f} s", style=style)
    if len(rows) > SHOWN_ENVIRONMENTS:
        table.add_row(f"and {len(rows) - SHOWN_ENVIRONMENTS} more")
    return table


def _plain(value: object) -> str:
    """Text that stays on its line and sets no colours."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isprintable() else json.dumps(text)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
