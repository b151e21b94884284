"""The demo in the other weight bridge modes, by the mode's flag alone: same seed, same file, and it learns as well.

Each takes some minutes, restarts most of all, so they run where ATROPOS_DEMO_MODES names them:
`ATROPOS_DEMO_MODES=lora_only,lora_restart,none,broadcast,lora_only_4bit pytest tests/e2e/test_demo_modes.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {mode: ("--weight-bridge-mode", mode) for mode in ("lora_only", "lora_restart", "none")} | {
    "broadcast": ("--num-inference-nodes", "2"),
    "lora_only_4bit": ("--weight-bridge-mode", "lora_only", "--load-in-4bit"),
}
ASKED = os.environ.get("ATROPOS_DEMO_MODES", "").split(",")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", list(FLAGS))
def test_r23_the_demo_learns_in_every_mode_by_its_flag_alone(start_launcher, traces, mode: str) -> None:
    if mode not in ASKED:
        pytest.skip(f"takes minutes; ATROPOS_DEMO_MODES={mode} runs it")
    demo = str(ROOT / "configs/demo.yaml")
    launched = start_launcher(
        *(sys.executable, "-m", "example_trainer.run", "--config", demo, "--seed", "1", *FLAGS[mode])
    )
    launched.wait_for_steps(1, 900)
    tree = launched.tree()
    code, _, error = launched.end(3000)
    assert code == 0, error + launched.logs()
    rows = rows_of(launched.run_dir)
    rewards = [row["reward/mean"] for row in rows]
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert max(sum(rewards[end - 5 : end]) / 5 for end in range(5, len(rewards) + 1)) >= 0.9
    assert summary["accuracy_base"] <= 0.15
    assert summary["accuracy_trained"] >= 0.9
    compared = [row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row]
    assert compared
    assert max(compared) <= 1e-4
    assert traces(launched, tree) == []
