"""Summarises a finished run from its directory: the table that a launch and `atropos report` print at the end.

`python -m example_trainer.launcher.summary RUN` draws reward, length and held-out accuracy into `RUN/reward.png`; it
runs as a program of its own, so that the launcher never loads matplotlib. `write_rollout_pages` writes the rollouts of
each environment as a page for a browser, next to the file of kept groups.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import Any

from rich.table import Table
from rich.text import Text

from atropos_api.common import metric_names as names
from atropos_api.common.errors import AtroposError
from atropos_api.common.files import read_json_object, replace_whole, write_whole
from environments.sdk.group_files import write_page
from example_trainer.errors import TrainerError
from example_trainer.launcher.data_use import data_lines, read_data_use, trained_length
from example_trainer.launcher.evaluations import HeldOutScore, read_accuracies, read_held_out
from example_trainer.launcher.run_dir import TIMELINE_NAME
from example_trainer.launcher.totals import Totals, count_totals, read_launches, total_lines
from example_trainer.monitoring.trackers import EVENTS_FILE, METRICS_FILE, ROLLOUTS, MetricsTail

WINDOW_STEPS = 5
GOOD_REWARD = 0.9
GOOD_REWARD_WINDOW_STEPS = 3
SHOWN_WITHOUT_SIGNAL = 0.5
"""Share of sequences without a learning signal above which the table shows it."""
MOST_STEPS_NAMED = 10
"""A value near its limit may make a sign every other step of a long run."""
SUMMARY_NAME = "summary.json"


class NoRun(TrainerError):
    """Raised if the directory holds no metrics of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of one run; a figure that the run did not report is None."""

    steps: int
    accuracy_base: float | None = None
    """Mean over the environments, as `accuracy_trained` is."""
    accuracy_trained: float | None = None
    held_out: HeldOutScore | None = None
    """The accuracy, or another metric of the evaluations where there is none."""
    reward_first: float | None = None
    reward_last: float | None = None
    length_first: float | None = None
    length_last: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    alignment_max: float | None = None
    staleness_mean: float | None = None
    """Mean over all steps, in steps."""
    staleness_max: float | None = None
    reward_best: float | None = None
    """The highest mean over five steps."""
    first_step_after_seconds: float | None = None
    good_reward_step: int | None = None
    good_reward_after_seconds: float | None = None
    signs: tuple[str, ...] = ()
    """Each kind of sign of trouble with the steps at which it appeared; of many their number, first and last."""
    split_seconds: Mapping[str, float] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    data: tuple[Mapping[str, Any], ...] = ()
    """The broker's counts of items and groups, by environment."""
    trained_length: float | None = None
    """Mean length of all trained answers, in tokens."""
    no_signal_fraction: float | None = None
    """Mean over the steps of the share of sequences without a learning signal: their group has equal rewards."""

    def write(self, run_dir: Path) -> None:
        write_whole(run_dir / SUMMARY_NAME, json.dumps(asdict(self), indent=2) + "\n")


def summarise(
    run_dir: Path,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    timeline: Mapping[str, float] | None = None,
    cost_per_hour: float | None = None,
) -> Summary:
    """Read `metrics.jsonl` (unless its rows are given) and the evaluations; `timeline` has the launcher's milestones
    as Unix times.
    """
    rows = read_steps(run_dir) if rows is None else rows
    rewards, lengths = _series(rows, names.REWARD_MEAN), _series(rows, names.RESPONSE_LENGTH_MEAN)
    held_out = read_held_out(run_dir / "evals")
    accuracy = held_out if held_out is not None and held_out.metric == names.EVAL_ACCURACY else None
    good = first_good_row(rows)
    started_at = (timeline or {}).get("start", 0.0)
    # A resumed run's rows begin with those of the launches before.
    launched = [row for row in rows if (_timestamp(row) or 0.0) >= started_at]
    return Summary(
        steps=int(rows[-1].get(names.STEP, len(rows))),
        accuracy_base=None if accuracy is None else accuracy.first,
        accuracy_trained=None if accuracy is None else accuracy.last,
        held_out=held_out,
        reward_first=_mean(rewards[:WINDOW_STEPS]),
        reward_last=_mean(rewards[-WINDOW_STEPS:]),
        length_first=_mean(lengths[:1]),
        length_last=_mean(lengths[-WINDOW_STEPS:]),
        tokens_per_second=overall_rate(rows),
        step_seconds=_median(_series(rows, names.TIME_STEP)),
        alignment_max=max(_series(rows, names.ALIGNMENT_DIFF_MAX), default=None),
        staleness_mean=_mean(_series(rows, names.STALENESS_MEAN)),
        staleness_max=max(_series(rows, names.STALENESS_MAX), default=None),
        reward_best=max(rolling_mean(rewards)[WINDOW_STEPS - 1 :], default=None),
        first_step_after_seconds=_since(started_at, launched[0] if timeline and launched else None),
        good_reward_step=int(good[names.STEP]) if good else None,
        good_reward_after_seconds=_since(started_at, good if timeline and good in launched else None),
        signs=read_signs(run_dir),
        split_seconds=split_times(timeline, launched) if timeline and launched else {},
        totals=count_totals(rows, read_launches(run_dir, timeline), cost_per_hour),
        data=read_data_use(run_dir),
        trained_length=trained_length(rows),
        no_signal_fraction=_mean(_series(rows, names.NO_SIGNAL_FRACTION)),
    )


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`; raise `NoRun` if there is no finished step."""
    if not run_dir.is_dir():
        raise NoRun(f"{run_dir}: no such directory; name that of a run, such as runs/demo-DATE")
    rows = MetricsTail(run_dir / METRICS_FILE).read()
    if not rows:
        raise NoRun(f"{run_dir} holds no {METRICS_FILE} with a finished step")
    return rows


def read_timeline(run_dir: Path) -> dict[str, float] | None:
    """Return the milestones of the last launch in this directory that reached its end; None if none did."""
    return read_json_object(run_dir / TIMELINE_NAME) or None


def read_signs(run_dir: Path) -> tuple[str, ...]:
    """Return each kind of sign in `events.jsonl` with its steps; empty if the run wrote none."""
    steps: dict[str, list[Any]] = {}
    for row in MetricsTail(run_dir / EVENTS_FILE).read():
        if {"sign", "step"} <= row.keys():
            steps.setdefault(str(row["sign"]), []).append(row["step"])
    return tuple(f"{sign} ({name_steps(at)})" for sign, at in steps.items())


def name_steps(steps: Sequence[Any]) -> str:
    """Name each of a few steps; of many their number, the first and the last."""
    if len(steps) > MOST_STEPS_NAMED:
        return f"{len(steps):,} steps from {steps[0]} to {steps[-1]}"
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def first_good_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of the step at which the mean reward over three steps first reached 0.9; None if it never did."""
    rewards = _series(rows, names.REWARD_MEAN)
    for end in range(GOOD_REWARD_WINDOW_STEPS, len(rewards) + 1):
        if (_mean(rewards[end - GOOD_REWARD_WINDOW_STEPS : end]) or 0.0) >= GOOD_REWARD:
            return rows[end - 1]
    return None


def overall_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the sampled tokens of all batches over the time of all steps; a mean of rates would favour short steps."""
    known = [row for row in rows if row.get(names.TOKENS_PER_SECOND) and row.get(names.TIME_STEP)]
    seconds = sum(float(row[names.TIME_STEP]) for row in known)
    tokens = sum(float(row[names.TOKENS_PER_SECOND]) * float(row[names.TIME_STEP]) for row in known)
    return tokens / seconds if seconds else None


def split_times(timeline: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Split the time from the command to its end into consecutive phases; return the seconds of each."""
    marks: list[tuple[str, float | None]] = [
        ("base model", timeline.get("base model")),
        ("imports", timeline.get("imports")),
        ("engine", timeline.get("vllm")),
        ("first batch", _first_batch_at(rows)),
        ("steps", _timestamp(rows[-1])),
        ("end", timeline.get("end")),
    ]
    split: dict[str, float] = {}
    last = timeline["start"]
    for name, at in marks:
        if at is not None and at >= last:
            split[name] = round(at - last, 2)
            last = at
    return split


def as_table(summary: Summary) -> Table:
    """Build the table of the figures that a reader looks for first."""
    table = Table(title="Summary", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in summary_lines(summary):
        if value:
            # As text: an environment's name may hold what rich would read as markup.
            table.add_row(Text(label), Text(value))
    return table


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return label and text of each figure; the text of one that is not known is empty."""
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary.split_seconds.items())
    without_signal = summary.no_signal_fraction
    much_without_signal = without_signal if (without_signal or 0.0) > SHOWN_WITHOUT_SIGNAL else None
    return [
        _held_out_line(summary.held_out),
        (f"reward, first and last {WINDOW_STEPS} steps", _change(summary.reward_first, summary.reward_last, "{:.3f}")),
        (f"best reward over {WINDOW_STEPS} steps", _text(summary.reward_best, "{:.3f}")),
        ("mean answer length, tokens", _change(summary.length_first, summary.length_last, "{:.1f}")),
        ("steps", str(summary.steps)),
        ("generated tokens per second", _text(summary.tokens_per_second, "{:,.0f}")),
        ("seconds per step, median", _text(summary.step_seconds, "{:.2f}")),
        ("largest logprob difference, trainer and vLLM", _text(summary.alignment_max, "{:.1e}")),
        ("staleness of trained tokens, mean and largest", _pair(summary.staleness_mean, summary.staleness_max)),
        ("first step trained after", _text(summary.first_step_after_seconds, "{:.1f} s")),
        (
            f"reward {GOOD_REWARD} after",
            _text(summary.good_reward_after_seconds, "{:.1f} s") + _text(summary.good_reward_step, " (step {})"),
        ),
        *total_lines(summary.totals),
        *data_lines(summary.data, summary.trained_length),
        ("sequences without a learning signal", _text(much_without_signal, "{:.0%}")),
        ("signs of trouble", ", ".join(summary.signs)),
        ("time of the last launch", f"{sum(summary.split_seconds.values()):.1f} s: {split}" if split else ""),
    ]


def _held_out_line(score: HeldOutScore | None) -> tuple[str, str]:
    if score is None or score.metric == names.EVAL_ACCURACY:
        label = "accuracy, held-out problems"
    else:
        label = f"{score.metric}, held-out data"
    return label, "" if score is None else _change(score.first, score.last, "{:.3f}")


def _change(first: float | None, last: float | None, form: str) -> str:
    known = [form.format(value) for value in (first, last) if value is not None]
    return " -> ".join(known)


def _pair(mean: float | None, largest: float | None) -> str:
    return ", ".join(f"{value:.2f}" for value in (mean, largest) if value is not None)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return median_high(values) if values else None


def _timestamp(row: Mapping[str, Any]) -> float | None:
    value = row.get("timestamp")
    return float(value) if isinstance(value, int | float) else None


def _first_batch_at(rows: Sequence[Mapping[str, Any]]) -> float | None:
    ended = _timestamp(rows[0])
    return None if ended is None else ended - float(rows[0].get(names.TIME_STEP, 0.0))


def _since(started_at: float, row: Mapping[str, Any] | None) -> float | None:
    at = _timestamp(row) if row is not None else None
    return None if at is None else at - started_at


REWARD_COLOUR, LENGTH_COLOUR, ACCURACY_COLOUR = "#1f77b4", "#b0b0b0", "#d62728"
ACCURACY_MARKERS = "Ds^v*"


def draw(run_dir: Path) -> Path:
    """Draw the picture of a run and return its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_steps(run_dir)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _draw_lengths(axes.twinx(), rows)
    _draw_rewards(axes, rows)
    _draw_accuracies(axes, read_accuracies(run_dir / "evals"))
    axes.legend(loc="best")
    path = run_dir / "reward.png"
    replace_whole(path, lambda partial: figure.savefig(partial, dpi=120))
    return path


def rolling_mean(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Return the mean over the last `window` values at each position, over fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _draw_rewards(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    # metrics.jsonl leaves out what is not finite.
    known = [row for row in rows if isinstance(row.get(names.REWARD_MEAN), int | float)]
    steps, rewards = [row[names.STEP] for row in known], _series(known, names.REWARD_MEAN)
    axes.plot(steps, rewards, "o", color=REWARD_COLOUR, alpha=0.35, markersize=4, label="reward of the step")
    axes.plot(steps, rolling_mean(rewards), color=REWARD_COLOUR, linewidth=2, label=f"mean of {WINDOW_STEPS} steps")
    bottom, top = min([0.0, *rewards]), max([1.0, *rewards])
    margin = 0.02 * (top - bottom)
    axes.set(xlabel="step", ylabel="reward", ylim=(bottom - (margin if bottom < 0 else 0.0), top + margin))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if missing := len(rows) - len(known):
        axes.set_title(f"no finite reward in {missing} of {len(rows)} steps", fontsize="medium")


def _draw_lengths(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    known = [row for row in rows if names.RESPONSE_LENGTH_MEAN in row]
    lengths = [row[names.RESPONSE_LENGTH_MEAN] for row in known]
    axes.plot([row[names.STEP] for row in known], lengths, color=LENGTH_COLOUR, linewidth=1.5)
    axes.set_ylabel("mean answer length, tokens", color=LENGTH_COLOUR)
    axes.set_ylim(bottom=0)


def _draw_accuracies(axes: Any, accuracies: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for (environment, points), marker in zip(accuracies.items(), cycle(ACCURACY_MARKERS), strict=False):
        steps, values = zip(*points, strict=True)
        label = f"accuracy, {environment or 'held-out problems'}"
        axes.plot(steps, values, marker, color=ACCURACY_COLOUR, label=label, clip_on=False)


def write_rollout_pages(run_dir: Path) -> list[str]:
    """Write the page of each file of groups in the run directory; return one line about each, also if it failed."""
    lines: list[str] = []
    for groups in sorted((run_dir / ROLLOUTS).glob("*.jsonl")):
        try:
            lines.append(f"rollouts: {write_page(groups, groups.with_suffix('.html'))}")
        except (AtroposError, OSError) as error:
            lines.append(f"rollouts: no page of {groups} ({error})")
    return lines


if __name__ == "__main__":
    sys.stdout.write(f"{draw(Path(sys.argv[1]))}\n")
