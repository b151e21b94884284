"""The tutorial's runs on a CPU, as the page prints them: what it says of their curves is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tutorial import ROOT, commands, files

WINDOW = 5

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("ATROPOS_TUTORIAL" not in os.environ, reason="takes ten minutes; ATROPOS_TUTORIAL=1 runs it"),
]


def test_the_runs_of_the_tutorial_go_as_it_says(tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands():
        if command.startswith(("python ", "atropos-grpo-run --config")):
            done = subprocess.run(
                ["bash", "-c", command],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env=variables,
                timeout=1200,
            )
            assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr
    rises = {run.name: rise(run) for run in (tmp_path / "runs").iterdir()}
    assert rises["control"] < 0.15, rises
    assert min(rises[name] for name in ("half", "own-data", "stories")) > 0.3, rises
    assert (tmp_path / "runs/stories/rollouts/environment.html").is_file()


def rise(run: Path) -> float:
    """Return how much the mean reward of the last steps is above that of the first."""
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW
