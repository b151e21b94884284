"""Curves as pure SVG, drawn as the live page draws them: no script, no font and no request are needed to see them.

A panel is an entry of the page's `panels.json`, so a report and the page show the same metrics with the same ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from atropos_api.common.html_pages import as_html, visible
from example_trainer.launcher.summary import name_steps

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 8, 8, 22
MOST_POINTS = 400
"""Points of one line: about one for each pixel."""
POINTS_WITH_DOTS = 60
COLOURS = 8

STYLE = """
.chart svg { width: 100%; height: auto; display: block; }
.chart svg text { font-size: 11px; fill: var(--ink-2); }
.chart svg polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart svg polygon { stroke: none; opacity: .16; }
.chart svg .dashed { stroke-dasharray: 6 3; }
.chart svg .grid { stroke: var(--rule); }
.chart svg .healthy { fill: var(--healthy); }
.chart svg .mark-of-sign { stroke: var(--blocked); stroke-dasharray: 4 4; }
""" + "".join(
    f".s{n} {{ stroke: var(--line-{n}); }} .f{n} {{ fill: var(--line-{n}); }}\n" for n in range(1, COLOURS + 1)
)

Panel = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve; `spread` has, for each step, the distance from the curve to the edge of its shade."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    spread: Sequence[float] | None = None
    dashed: bool = False
    last: float | None = None
    """The newest value, which the legend shows."""


def make_line(
    rows: Sequence[Mapping[str, Any]], name: str, *, label: str, spread: str | None = None, dashed: bool = False
) -> Line | None:
    """Return a metric of a run's rows, reduced so that each spike stays; None if no step has it."""
    import numpy as np

    from atropos_api.page.series import min_max_indices

    known = [row for row in rows if _is_number(row.get(name))]
    if not known:
        return None
    steps = np.array([int(row.get("step", at)) for at, row in enumerate(known, 1)], dtype=np.int64)
    values = np.array([float(row[name]) for row in known])
    shown = min_max_indices(steps, values, MOST_POINTS).tolist()
    edges = None if spread is None else [float(known[at].get(spread) or 0.0) for at in shown]
    return Line(
        label=label,
        steps=steps[shown].tolist(),
        values=values[shown].tolist(),
        spread=edges if edges and any(edges) else None,
        dashed=dashed,
        last=float(values[-1]),
    )


def draw_chart(panel: Panel, lines: Sequence[Line], marks: Iterable[int] = ()) -> str:
    """Return the figure of a panel with its legend; `marks` are the steps at which its sign of trouble appeared."""
    marks = sorted(set(marks))
    keys = "".join(
        f'<li><span class="swatch line-{_colour(at)}"></span> {as_html(line.label)} <b>{number(line.last)}</b></li>'
        for at, line in enumerate(lines)
    )
    healthy = panel.get("healthy")
    said = [f"healthy from {healthy[0]} to {healthy[1]}"] if healthy else []
    said += [f"sign of trouble at {name_steps(marks)}"] if marks else []
    title, help_text = escape(panel["title"]), escape(panel.get("help", ""))
    return (
        f'<figure class="chart"><figcaption><strong>{title}</strong><span class="note">{help_text}</span></figcaption>'
        f'{_svg(panel, lines, marks)}<ul class="keys">{keys}</ul>'
        f'<p class="readout">{escape(" · ".join(said))}</p></figure>\n'
    )


def number(value: float | None) -> str:
    """Return a number with about three significant digits, as the page does: 0.0123, 4.56, 12,300."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 0.001 or size == 0 else f"{value:.1e}"


class _Frame:
    """The plane of a chart: it turns steps and values into positions."""

    def __init__(self, panel: Panel, lines: Sequence[Line]) -> None:
        steps = [step for line in lines for step in (line.steps[0], line.steps[-1])]
        self.first, self.last = min(steps), max(steps)
        self.is_log = bool(panel.get("log"))
        ends = [value for line in lines for value in _ends(line)]
        kept = [value for value in ends if value > 0 or not self.is_log]
        self.low, self.high = _log_range(kept) if self.is_log else _range(panel, kept)

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        at = math.log10(max(value, 1e-300)) if self.is_log else value
        share = min(1.0, max(0.0, (at - self.low) / ((self.high - self.low) or 1)))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        if self.is_log:
            step = max(1, math.ceil((self.high - self.low) / 5))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, step)]
        return _ticks(self.low, self.high)

    def step_ticks(self) -> list[int]:
        return sorted({round(tick) for tick in _ticks(self.first, self.last) if self.first <= round(tick) <= self.last})


def _svg(panel: Panel, lines: Sequence[Line], marks: Sequence[int]) -> str:
    frame = _Frame(panel, lines)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_described(panel, lines))}">']
    if healthy := panel.get("healthy"):
        top, base = frame.y(healthy[1]), frame.y(healthy[0])
        box = f'x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{round(base - top, 1)}"'
        parts.append(f'<rect class="healthy" {box}/>')
    for tick in frame.ticks():
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number(tick)}</text>')
    parts += [
        f'<text x="{frame.x(step)}" y="{HEIGHT - 6}" text-anchor="middle">{step:,}</text>'
        for step in frame.step_ticks()
    ]
    for x in {round(frame.x(step)): frame.x(step) for step in marks}.values():  # one for each pixel is enough
        parts.append(f'<line class="mark-of-sign" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    parts += [_drawn(frame, line, _colour(at)) for at, line in enumerate(lines)]
    return "".join([*parts, "</svg>"])


def _drawn(frame: _Frame, line: Line, colour: int) -> str:
    points = [(frame.x(step), frame.y(value)) for step, value in zip(line.steps, line.values, strict=True)]
    parts = []
    if line.spread is not None:
        around = list(zip(line.steps, line.values, line.spread, strict=True))
        edge = [(frame.x(step), frame.y(value + wide)) for step, value, wide in around]
        edge += [(frame.x(step), frame.y(value - wide)) for step, value, wide in reversed(around)]
        parts.append(f'<polygon class="f{colour}" points="{_joined(edge)}"/>')
    dashes = " dashed" if line.dashed else ""
    parts.append(f'<polyline class="s{colour}{dashes}" points="{_joined(points)}"/>')
    if len(points) < POINTS_WITH_DOTS:
        parts += [f'<circle class="f{colour}" cx="{x}" cy="{y}" r="2"/>' for x, y in points]
    return "".join(parts)


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _described(panel: Panel, lines: Sequence[Line]) -> str:
    shown = "; ".join(f"{visible(line.label)} from {number(line.values[0])} to {number(line.last)}" for line in lines)
    return f"{panel['title']}: {shown}"


def _ends(line: Line) -> Iterable[float]:
    spread = line.spread or [0.0] * len(line.values)
    for value, wide in zip(line.values, spread, strict=True):
        yield value - wide
        yield value + wide


def _range(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    low = min([*values, panel["floor"]] if "floor" in panel else values)
    high = max(values)
    pad = 0.06 * (high - low or abs(high) or 1.0)
    top = panel.get("healthy", (0.0, 0.0))[1]
    high = max(high, top) if high > 0.5 * top else high
    return (low if "floor" in panel else low - pad), high + pad


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    powers = [math.log10(value) for value in values] or [0.0]
    return math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers from `low` to `high`."""
    rough = (high - low) / 4 or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _colour(at: int) -> int:
    return at % COLOURS + 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
