"""Each weight bridge mode learns in a run of a few steps, by the demo's file and the mode's flag alone.

The long form is `test_demo_modes.py`; `shared_vllm` is `test_demo.py`. Runs go side by side where memory allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Launched

ROOT = Path(__file__).resolve().parents[2]
MODES = ("lora_only", "lora_restart", "none")
STEPS, WINDOW = 12, 3
FLAGS = (
    *("--config", str(ROOT / "configs/demo.yaml"), "--seed", "1", "--training-steps", str(STEPS)),
    *("--vllm-restart-interval", "4", "--env.eval_at_start", "false", "--env.eval_at_end", "false"),
)
BYTES_A_RUN = 4 << 30
"""Memory of one run's server, trainer, environment and broker; 3.1 GiB were seen."""
LEAST_RISE = 0.2
"""Smallest rise of the mean reward over a window; 0.34 to 0.40 were seen, and the demo's control falls."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def runs(start_launcher: Callable[..., Launched], tmp_path: Path) -> dict[str, Launched]:
    """A finished run of each mode; several run at a time if there is memory for them."""
    at_once = max(1, psutil.virtual_memory().available // BYTES_A_RUN)
    launched: dict[str, Launched] = {}
    for mode in MODES:
        if len(launched) >= at_once:
            list(launched.values())[-at_once].process.wait(600)
        command = (sys.executable, "-m", "example_trainer.run", *FLAGS, "--weight-bridge-mode", mode)
        launched[mode] = start_launcher(*command, run_dir=tmp_path / mode)
    return launched


def rows_of(run: Launched) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_every_mode_learns_from_what_it_publishes(runs: dict[str, Launched]) -> None:
    rises = {}
    for mode, run in runs.items():
        code, _, error = run.end(800)
        assert code == 0, mode + error + run.logs()
        rows = rows_of(run)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), mode
        assert rows[-1]["policy_version"] > rows[0]["policy_version"], mode
        compared = [row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row]
        assert max(compared) <= 1e-4, mode
        rewards = [row["reward/mean"] for row in rows]
        rises[mode] = sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW
    assert min(rises.values()) >= LEAST_RISE, rises
