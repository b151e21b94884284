"""Our losses equal those of TRL's own code; it runs if an environment with TRL exists and is requested."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path.home() / ".cache" / "atropos" / "bench-trl-1.16.0" / "bin" / "python"


@pytest.mark.skipif(
    os.environ.get("ATROPOS_TRL") != "1" or not PYTHON.exists(),
    reason="set ATROPOS_TRL=1 after a run of benchmarks/trl_losses.py, which makes the environment",
)
def test_losses_and_gradients_equal_trls_with_and_without_importance_correction() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, ROOT / "benchmarks" / "trl_losses.py", "--inside", "--batches", "5"]
    printed = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True).stdout
    rows = json.loads(printed.splitlines()[-1])
    names = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "luspo", "sapo", "vespo"}
    assert {row["loss"] for row in rows} == names
    assert {row["correction"] for row in rows} == {"none", "token_truncate", "token_mask"}
    for row in rows:
        assert max(row["value"], row["gradient"]) < 1e-5, row
        assert row["largest_gradient"] > 0.01, row
