"""The demo runs from an installed wheel, in a folder that has nothing of the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.installed import install_wheel

WINDOW = 5
LEAST_RISE = 0.4
"""Of the mean reward from the first steps to the last; the demo rises by about 0.7."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("ATROPOS_WHEEL" not in os.environ, reason="takes minutes; ATROPOS_WHEEL=1 runs it"),
]


def test_the_demo_of_an_installed_wheel_learns(tmp_path: Path) -> None:
    installed = install_wheel(tmp_path)
    shown = installed.run("atropos-grpo-run", "--config", "demo", timeout_seconds=1500)
    assert shown.returncode == 0, shown.stderr
    (run,) = (installed.cwd / "runs").iterdir()
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW >= LEAST_RISE
    assert (run / "reward.png").is_file()
    report = installed.run("atropos", "report", str(run))
    assert report.returncode == 0, report.stderr
