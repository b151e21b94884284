"""Totals of a whole run: tokens generated, trained and wasted, processor time, and the cost at a given price.

Tokens are sums over the rows of `metrics.jsonl`, so they cover all launches of a resumed run. The time is that of the
last launch from its command to its end, and of the steps of the launches before. Processor time is that of the last
launch, which the launcher writes into its timeline.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_api.common import metric_names as names
from example_trainer.processes.gpus import DEVICES, count_gpus

CPU_SECONDS, GPUS = "cpu_seconds", "gpus"
"""Keys of a run's timeline file; its other keys name events, with their Unix times."""
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
    """Share of the trained tokens that gave no gradient."""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU time of all programs of the last launch."""
    gpu_seconds: float | None = None
    """Time of the last launch times the number of GPUs that it could use; None without a GPU."""
    cost: float | None = None
    """Price of all hours, in the currency of the price per hour."""


def count_totals(
    rows: Sequence[Mapping[str, Any]], timeline: Mapping[str, float] | None = None, cost_per_hour: float | None = None
) -> Totals:
    """Return the totals over the rows of `metrics.jsonl`; `cost_per_hour` is the price of all machines together."""
    timeline = timeline or {}
    started_at, ended_at = timeline.get("start", 0.0), timeline.get("end", 0.0)
    launch_seconds = max(0.0, ended_at - started_at)
    earlier = [row for row in rows if not launch_seconds or float(row.get("timestamp", 0.0)) < started_at]
    seconds = launch_seconds + sum(float(row.get(names.TIME_STEP, 0.0)) for row in earlier)
    gpus = timeline.get(GPUS, 0.0)
    return Totals(
        generated_tokens=_whole(_total(rows, names.SEQUENCES, names.RESPONSE_LENGTH_MEAN)),
        trained_tokens=_whole(_total(rows, names.TRAINED_TOKENS)),
        forward_tokens=_whole(_total(rows, names.FORWARD_TOKENS)),
        padded_fraction=_share(rows, names.PADDED_FRACTION, names.FORWARD_TOKENS),
        zero_gradient_fraction=_share(rows, names.ZERO_GRADIENT_FRACTION, names.TRAINED_TOKENS),
        seconds=round(seconds, 2),
        cpu_seconds=timeline.get(CPU_SECONDS),
        gpu_seconds=round(gpus * launch_seconds, 2) if gpus else None,
        cost=None if cost_per_hour is None else round(cost_per_hour * seconds / SECONDS_PER_HOUR, 4),
    )


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
