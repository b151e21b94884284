"""Totals of a whole run: tokens generated, trained and wasted, processor time, and the cost at a given price.

Tokens are sums over the rows of `metrics.jsonl`, so they cover all launches of a resumed run. The launcher adds a line
to `launches.jsonl` at the end of each launch, also of one that failed or was stopped: the hours are those of all
launches there, and of the steps that lie in none of them, since a launch that was killed left no line.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_api.common import metric_names as names
from example_trainer.monitoring.trackers import MetricsTail
from example_trainer.processes.gpus import DEVICES, count_gpus

LAUNCHES_NAME = "launches.jsonl"
START, END, CPU_SECONDS, GPUS = "start", "end", "cpu_seconds", "gpus"
"""Keys of a launch's record and of a run's timeline file; the latter's other keys name events with their Unix times."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The totals of one run; a number that its metrics do not contain is None."""

    generated_tokens: int | None = None
    """Tokens sampled in all batches, also those that were not trained."""
    trained_tokens: int | None = None
    forward_tokens: int | None = None
    """Tokens that went through the trainer's model, padding included, over all passes."""
    padded_fraction: float | None = None
    """Share of the forward tokens that were padding."""
    zero_gradient_fraction: float | None = None
    """Share of the trained tokens without a gradient of the policy loss."""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU time of all programs."""
    gpu_seconds: float | None = None
    """Time of each launch times the number of GPUs that it could use; None without a GPU."""
    cost: float | None = None
    """Price of all hours, in the currency of the price per hour."""


def count_totals(
    rows: Sequence[Mapping[str, Any]],
    launches: Sequence[Mapping[str, float]] = (),
    cost_per_hour: float | None = None,
) -> Totals:
    """Return the totals over the rows of `metrics.jsonl`; `cost_per_hour` is the price of all machines together."""
    apart = [row for row in rows if not any(_lies_in(row, launch) for launch in launches)]
    seconds = sum(map(_seconds, launches)) + sum(float(row.get(names.TIME_STEP, 0.0)) for row in apart)
    cpu_seconds = [launch[CPU_SECONDS] for launch in launches if CPU_SECONDS in launch]
    gpu_seconds = sum(launch.get(GPUS, 0.0) * _seconds(launch) for launch in launches)
    return Totals(
        generated_tokens=_whole(_total(rows, names.SEQUENCES, names.RESPONSE_LENGTH_MEAN)),
        trained_tokens=_whole(_total(rows, names.TRAINED_TOKENS)),
        forward_tokens=_whole(_total(rows, names.FORWARD_TOKENS)),
        padded_fraction=_share(rows, names.PADDED_FRACTION, names.FORWARD_TOKENS),
        zero_gradient_fraction=_share(rows, names.ZERO_GRADIENT_FRACTION, names.TRAINED_TOKENS),
        seconds=round(seconds, 2),
        cpu_seconds=round(sum(cpu_seconds), 2) if cpu_seconds else None,
        gpu_seconds=round(gpu_seconds, 2) or None,
        cost=None if cost_per_hour is None else round(cost_per_hour * seconds / SECONDS_PER_HOUR, 4),
    )


def record_launch(run_dir: Path, launch: Mapping[str, float]) -> None:
    """Add the record of a launch that has ended to the run directory."""
    line = json.dumps({name: launch[name] for name in (START, END, CPU_SECONDS, GPUS) if name in launch})
    with (run_dir / LAUNCHES_NAME).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def read_launches(run_dir: Path, timeline: Mapping[str, float] | None = None) -> list[Mapping[str, float]]:
    """Return the record of each launch of a run directory, that of `timeline` included; one for each start."""
    recorded = [row for row in MetricsTail(run_dir / LAUNCHES_NAME).read() if {START, END} <= row.keys()]
    last = [timeline] if timeline and {START, END} <= timeline.keys() else []
    return list({launch[START]: launch for launch in (*recorded, *last)}.values())


def processor_use(devices: Path = DEVICES) -> dict[str, float]:
    """Return the CPU time of this process and all that it started and has waited for, and the number of its GPUs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    gpus = count_gpus(os.environ, devices)
    return {CPU_SECONDS: round(sum(each.ru_utime + each.ru_stime for each in used), 2), GPUS: float(gpus)}


def total_lines(totals: Totals) -> list[tuple[str, str]]:
    """Return the rows of the summary's table, those without a value included."""
    known = (totals.generated_tokens, totals.trained_tokens, totals.forward_tokens)
    counts = "" if None in known else ", ".join(f"{count:,}" for count in known)
    shares = (totals.padded_fraction, totals.zero_gradient_fraction)
    hours = [
        f"{seconds / SECONDS_PER_HOUR:,.3f} {kind}"
        for kind, seconds in (("in all", totals.seconds), ("CPU", totals.cpu_seconds), ("GPU", totals.gpu_seconds))
        if seconds
    ]
    return [
        ("tokens generated, trained, computed", counts),
        (
            "padding, trained tokens without gradient",
            ", ".join(f"{share:.1%}" for share in shares if share is not None),
        ),
        ("hours", ", ".join(hours)),
        ("cost", "" if totals.cost is None else f"{totals.cost:,.2f}"),
    ]


def _seconds(launch: Mapping[str, float]) -> float:
    return max(0.0, launch[END] - launch[START])


def _lies_in(row: Mapping[str, Any], launch: Mapping[str, float]) -> bool:
    return launch[START] <= float(row.get("timestamp", 0.0)) <= launch[END]


def _total(rows: Sequence[Mapping[str, Any]], *factors: str) -> float | None:
    """Return the sum over rows of the product of these metrics; None if no row has them all."""
    known = [row for row in rows if all(isinstance(row.get(name), int | float) for name in factors)]
    return sum(math.prod(float(row[name]) for name in factors) for row in known) if known else None


def _share(rows: Sequence[Mapping[str, Any]], share: str, of: str) -> float | None:
    known = [row for row in rows if share in row and of in row]
    whole, part = _total(known, of), _total(known, share, of)
    return part / whole if whole and part is not None else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
