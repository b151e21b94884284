"""Where a step's metrics go: always one JSON line in `metrics.jsonl`, and Weights & Biases when asked."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from atropos_api.common import metric_names as names
from example_trainer.errors import TrainerError

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Takes one step's metrics at a time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Appends a line a step and flushes it, so that whoever tails the file sees it at once.

    `resumed_step` is the last step that is kept: lines of later ones belong to a history that is trained anew.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None and path.exists():
            _keep_steps_up_to(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {names.STEP: step, "timestamp": time.time()}
        line |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class SummaryTracker:
    """Adds up times and rates and logs their means when the run ends (`--benchmark`)."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - the protocol's
        self._steps += 1
        for name, value in metrics.items():
            if name.startswith(("time/", "perf/", "sync/")):
                self._sums[name] = self._sums.get(name, 0.0) + value

    def close(self) -> None:
        for name, total in sorted(self._sums.items()):
            logger.info("benchmark: %s %.4f (mean of %d steps)", name, total / self._steps, self._steps)


class WandbTracker:
    """Logs to Weights & Biases; `WANDB_MODE=offline` is honoured by wandb itself."""

    def __init__(
        self, *, project: str | None, group: str | None, name: str, directory: Path, config: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrainerError("--use-wandb needs wandb: pip install wandb, or leave the flag out") from error
        self._run = wandb.init(
            project=project or "atropos-grpo",
            group=group or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
            name=name,
            dir=str(directory),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackerSet:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut short by a crash is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            logger.debug("an incomplete line in %s was left out", path)
    return found


def _keep_steps_up_to(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path) if line.get(names.STEP, 0) <= step]
    beside = path.with_suffix(".jsonl.part")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)  # noqa: PTH105 - the atomic one, by its name
