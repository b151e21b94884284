"""The report of one run, or of several over each other, as one file: `report.html`.

It holds the summary, signs of trouble with advice, the curves of the live page, the use of data, some rollouts and the
settings. It has no script and its policy lets a browser load nothing, so it can be kept, sent and opened anywhere; what
came from a model, an environment or a run file is shown as text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from atropos_api.common.errors import AtroposError
from atropos_api.common.files import read_json_object, write_whole
from atropos_api.common.html_pages import as_html, make_page, visible
from atropos_api.page.files import page_files
from environments.sdk.group_files import read_groups, render_group
from example_trainer.launcher import svg_chart
from example_trainer.launcher.comparison import as_rows, differing_settings, settings_of
from example_trainer.launcher.data_use import data_table
from example_trainer.launcher.run_dir import RunDir
from example_trainer.launcher.summary import Summary, read_steps, read_timeline, summarise
from example_trainer.launcher.svg_chart import Line, draw_chart, make_line
from example_trainer.monitoring.trackers import EVENTS_FILE, ROLLOUTS, MetricsTail

REPORT_NAME = "report.html"
MOST_GROUPS_READ = 2000
LONGEST_TEXT = 4000
"""Characters of one message in the report; the pages of rollouts have them all."""
MOST_OF_A_SIGN = 20
MOST_ENVIRONMENTS = 8
MOST_SHADES = 4
"""More shades over each other hide the lines, as on the live page."""
PLACES = re.compile(r"^env/(?P<id>-?\d+)/")

STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; } td { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as recorded in its directory."""

    root: Path
    label: str
    rows: Sequence[Mapping[str, Any]]
    signs: Sequence[Mapping[str, Any]]
    """The lines of `events.jsonl` about signs of trouble."""
    summary: Summary
    config: Mapping[str, Any] = field(default_factory=dict)
    """The content of `config.json`; empty if the launcher did not start the run."""

    @property
    def name(self) -> str:
        return visible(self.config.get("trainer", {}).get("name") or self.label)


def read_run(root: Path, *, label: str | None = None, cost_per_hour: float | None = None) -> RunRecord:
    """Read a run directory; raises `NoRun` if it holds no finished step."""
    rows = read_steps(root)
    signs = [row for row in MetricsTail(root / EVENTS_FILE).read() if {"sign", "step"} <= row.keys()]
    return RunRecord(
        root=root,
        label=visible(label or root.resolve().name),
        rows=rows,
        signs=signs,
        summary=summarise(root, rows=rows, timeline=read_timeline(root), cost_per_hour=cost_per_hour),
        config=read_json_object(RunDir(root=root, log_root=root / "logs", attempt=1).record),
    )


def write_report(runs: Sequence[RunRecord], path: Path) -> Path:
    """Write the report of these runs and return its path."""
    write_whole(path, render(runs))
    return path


def report_line(root: Path) -> str:
    """Write the report of a run that has ended and return a line about it, also if writing it fails."""
    try:
        return f"report: {write_report([read_run(root)], root / REPORT_NAME)}"
    except (AtroposError, OSError, ValueError, KeyError, TypeError) as error:
        return f"report: none of {root} ({type(error).__name__}: {error})"


def render(runs: Sequence[RunRecord]) -> str:
    """Return the report as HTML."""
    title = " and ".join(dict.fromkeys(run.name if len(runs) == 1 else run.label for run in runs))
    # The page's icon is a file of its own, which this file must not load.
    page_style = "\n".join(
        line for line in page_files()["page.css"].content.decode().splitlines() if "url(" not in line
    )
    sections = [_figures(runs), _signs(runs), _curves(runs)]
    sections += _details(runs[0]) if len(runs) == 1 else [_differences(runs)]
    return make_page(title, "".join(sections), style=f"{page_style}\n{svg_chart.STYLE}{STYLE}")


def _figures(runs: Sequence[RunRecord]) -> str:
    rows = as_rows([run.summary for run in runs])
    heads = [run.label for run in runs] if len(runs) > 1 else []
    return _card("Summary", _table(["", *heads] if heads else [], rows))


def _signs(runs: Sequence[RunRecord]) -> str:
    found = [(run, sign) for run in runs for sign in _first_of_each(run.signs)]
    if not found:
        return _card("Signs of trouble", '<p class="note">None was found.</p>')
    rows = [
        [
            *([run.label] if len(runs) > 1 else []),
            str(sign["sign"]),
            str(sign["step"]),
            str(sign.get("message", "")),
            str(sign.get("advice", "")),
        ]
        for run, sign in found
    ]
    heads = [*(["run"] if len(runs) > 1 else []), "sign", "step", "found", "advice"]
    left_out = sum(len(run.signs) for run in runs) - len(found)
    note = f'<p class="note">{left_out:,} more are in {EVENTS_FILE}: here are the first {MOST_OF_A_SIGN} of each.</p>'
    return _card("Signs of trouble", _table(heads, rows) + (note if left_out else ""))


def _first_of_each(signs: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the signs of a run without those of a kind that has appeared often before."""
    seen: Counter[str] = Counter()
    for sign in signs:
        seen[str(sign["sign"])] += 1
        if seen[str(sign["sign"])] <= MOST_OF_A_SIGN:
            yield sign


def _curves(runs: Sequence[RunRecord]) -> str:
    panels = json.loads(page_files()["panels.json"].content)
    figures = []
    for panel in panels:
        lines = [line for run in runs for line in _lines(run, panel, first=runs[0], several=len(runs) > 1)]
        marks = [int(sign["step"]) for run in runs for sign in run.signs if sign["sign"] == panel.get("sign")]
        if lines:
            figures.append(draw_chart(panel, lines, marks))
    return f'<section class="charts" aria-label="Curves">\n{"".join(figures)}</section>\n'


def _lines(run: RunRecord, panel: svg_chart.Panel, *, first: RunRecord, several: bool) -> Iterator[Line]:
    """Yield the curves of a panel, dashed for all runs but the first; {id} stands for each environment."""
    shown: list[tuple[str, str | None, str]] = []
    for name in panel["names"]:
        spread = panel.get("spread")
        if "{id}" in name:
            for number_, label in _environments(run).items():
                shown.append((name.format(id=number_), spread and spread.format(id=number_), label))
        else:
            shown.append((name, spread, name.partition("/")[2].replace("_", " ") or name))
    shaded = not several and len(shown) <= MOST_SHADES
    for name, spread, label in shown:
        whole = f"{run.label}: {label}" if several else label
        line = make_line(run.rows, name, label=whole, spread=spread if shaded else None, dashed=run is not first)
        if line is not None:
            yield line


def _environments(run: RunRecord) -> dict[str, str]:
    """Return the names of the environments by the ids that the metrics have; unnamed ones have a number."""
    named = {str(entry.get("environment_id")): str(entry.get("name")) for entry in run.summary.data}
    found = dict.fromkeys(at["id"] for row in run.rows[-100:] for name in row if (at := PLACES.match(name)))
    return {one: named.get(one, f"environment {one}") for one in islice(sorted(found, key=int), MOST_ENVIRONMENTS)}


def _details(run: RunRecord) -> list[str]:
    heads, rows = data_table(run.summary.data)
    data = [_card("Use of the data", _table(heads, rows))] if rows else []
    return [*data, *_rollouts(run), *_settings(run)]


def _rollouts(run: RunRecord) -> list[str]:
    files = sorted((run.root / ROLLOUTS).glob("*.jsonl"))
    parts = []
    for path in files[:MOST_ENVIRONMENTS]:
        try:
            groups = list(islice(read_groups(path), MOST_GROUPS_READ))
        except AtroposError:
            continue
        for why, at in _examples(groups):
            shown = render_group(at + 1, _as_text(groups[at]))
            parts.append(f'<p class="note">{as_html(path.stem)}, {why}</p>{shown}')
        if path.with_suffix(".html").exists():
            whole = f"{ROLLOUTS}/{path.stem}.html"
            parts.append(f'<p class="note">All {len(groups)} groups: {as_html(whole)} in the run directory.</p>')
    return [_card("Rollouts", "".join(parts))] if parts else []


def _examples(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return the indices of the most informative groups, each with the reason: newest, worst, and most divided."""
    scored = [at for at, group in enumerate(groups) if group["scores"]]
    if not scored:
        return []
    mean = {at: sum(groups[at]["scores"]) / len(groups[at]["scores"]) for at in scored}
    width = {at: max(groups[at]["scores"]) - min(groups[at]["scores"]) for at in scored}
    wanted = [
        ("the newest group", scored[-1]),
        ("the lowest mean reward", min(scored, key=lambda at: (mean[at], -at))),
        ("the rewards that differ most", max(scored, key=lambda at: (width[at], at))),
    ]
    return [(why, at) for place, (why, at) in enumerate(wanted) if at not in {one for _, one in wanted[:place]}]


def _as_text(content: Any) -> Any:
    """Return content with each text in it shortened, and its hidden characters shown."""
    if isinstance(content, str):
        left = len(content) - LONGEST_TEXT
        return visible(content if left <= 0 else f"{content[:LONGEST_TEXT]}… ({left:,} more characters)")
    if isinstance(content, Mapping):
        return {_as_text(key): _as_text(value) for key, value in content.items()}
    return [_as_text(one) for one in content] if isinstance(content, list) else content


def _settings(run: RunRecord) -> list[str]:
    if not run.config:
        return []
    rows = [[name, value] for name, value in settings_of(run.config, run.root).items()]
    command = " ".join(map(str, run.config.get("command") or ()))
    table = f'<details class="more"><summary>All settings ({len(rows)})</summary>{_table([], rows)}</details>'
    return [_card("Configuration", f"<pre>{as_html(command)}</pre>{table}")]


def _differences(runs: Sequence[RunRecord]) -> str:
    rows = differing_settings([settings_of(run.config, run.root) for run in runs])
    if not rows:
        return _card("Settings that differ", '<p class="note">None, by what the runs have recorded.</p>')
    return _card("Settings that differ", _table(["", *(run.label for run in runs)], rows))


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{title}</h2><div class="scroll">{content}</div></section>\n'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{as_html(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{as_html(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"
