"""Results of an evaluation as files: `metrics.json` and `samples.jsonl`, with the policy versions they belong to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atropos_api.common.whole_files import free_path, write_whole

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.json"
SAMPLES_FILE: Final = "samples.jsonl"
EARLIER_FOLDER: Final = "earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What `BaseEnv.evaluate_log` was given, plus where in the run it belongs."""

    metrics: Mapping[str, Any]
    task_name: str
    model_name: str
    seconds: float
    generation_parameters: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()
    step: int | None = None
    versions: frozenset[int] = field(default_factory=frozenset)

    def all_metrics(self) -> dict[str, Any]:
        """The metrics with the range of policy versions that were sampled; the same number twice when it was one."""
        versions = {}
        if self.versions:
            versions = {"policy_version_min": min(self.versions), "policy_version_max": max(self.versions)}
        return {**self.metrics, **versions}

    def document(self) -> dict[str, Any]:
        """The content of `metrics.json`, in the form of Atropos and lighteval."""
        metrics = self.all_metrics()
        return {
            "config_general": {
                "model_name": self.model_name,
                "total_evaluation_time_seconds": str(self.seconds),
                "generation_parameters": dict(self.generation_parameters),
                "step": self.step,
            },
            "results": {f"atropos|{self.task_name}|0": metrics, "all": metrics},
        }

    def write(self, directory: Path) -> None:
        """Both files, each whole or not there."""
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / SAMPLES_FILE, "".join(json.dumps(sample) + "\n" for sample in self.samples))
        write_whole(directory / METRICS_FILE, json.dumps(self.document(), indent=2) + "\n")


class ResultFolders:
    """The folders that one process writes results to; what another has left for the same step is kept aside."""

    def __init__(self) -> None:
        self._own: set[Path] = set()

    def write(self, result: EvaluationResult, directory: Path) -> None:
        if directory not in self._own and result.step is not None:
            kept = keep_earlier(directory)
            if kept is not None:
                logger.info("%s held the results of another run, which are in %s now", directory, kept)
        self._own.add(directory)
        result.write(directory)


def holds_results(directory: Path) -> bool:
    return any((directory / name).exists() for name in (METRICS_FILE, SAMPLES_FILE))


def keep_earlier(directory: Path) -> Path | None:
    """Move the results of an earlier process out of the way; where they are now, None if there were none."""
    if not holds_results(directory):
        return None
    kept = free_path(directory.parent / EARLIER_FOLDER / directory.name)
    kept.parent.mkdir(exist_ok=True)
    return directory.rename(kept)


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """One line of `name value`; what is no number is left as it is."""
    return " ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
