"""`python -m example_trainer.running.plot RUN`: draw reward, length and held-out accuracy into `RUN/reward.png`.

A program of its own, so that the launcher never loads matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_api.common import metric_names as names
from atropos_api.common.whole_files import replace_whole
from example_trainer.running.feed import MetricsTail
from example_trainer.running.summary import WINDOW_STEPS, NoRun, read_accuracies

REWARD_COLOUR, LENGTH_COLOUR, ACCURACY_COLOUR = "#1f77b4", "#b0b0b0", "#d62728"


def draw(run_dir: Path) -> Path:
    """The picture of a run; answers where it lies."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = MetricsTail(run_dir / "metrics.jsonl").read()
    if not rows:
        raise NoRun(f"{run_dir} holds no metrics.jsonl with a finished step")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _draw_lengths(axes.twinx(), rows)
    _draw_rewards(axes, rows)
    _draw_accuracies(axes, read_accuracies(run_dir / "evals"))
    axes.legend(loc="lower right")
    path = run_dir / "reward.png"
    replace_whole(path, lambda beside: figure.savefig(beside, dpi=120))
    return path


def rolling_mean(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Mean over the last `window` values at each place, over fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _draw_rewards(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    steps = [row[names.STEP] for row in rows]
    rewards = [row.get(names.REWARD_MEAN, float("nan")) for row in rows]
    axes.plot(steps, rewards, "o", color=REWARD_COLOUR, alpha=0.35, markersize=4, label="reward of the step")
    axes.plot(steps, rolling_mean(rewards), color=REWARD_COLOUR, linewidth=2, label=f"mean of {WINDOW_STEPS} steps")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))


def _draw_lengths(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    known = [row for row in rows if names.RESPONSE_LENGTH_MEAN in row]
    lengths = [row[names.RESPONSE_LENGTH_MEAN] for row in known]
    axes.plot([row[names.STEP] for row in known], lengths, color=LENGTH_COLOUR, linewidth=1.5)
    axes.set_ylabel("mean answer length, tokens", color=LENGTH_COLOUR)
    axes.set_ylim(bottom=0)


def _draw_accuracies(axes: Any, accuracies: Sequence[tuple[int, float]]) -> None:
    if accuracies:
        steps, values = zip(*accuracies, strict=True)
        axes.plot(steps, values, "D", color=ACCURACY_COLOUR, label="greedy accuracy, held-out problems", clip_on=False)


if __name__ == "__main__":
    sys.stdout.write(f"{draw(Path(sys.argv[1]))}\n")
