"""Results of an evaluation as files: `metrics.json` and `samples.jsonl`, with the policy versions they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
        _replace(directory / "samples.jsonl", "".join(json.dumps(sample) + "\n" for sample in self.samples))
        _replace(directory / "metrics.json", json.dumps(self.document(), indent=2) + "\n")


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """One line of `name value`; what is no number is left as it is."""
    return " ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
