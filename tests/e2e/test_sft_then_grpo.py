"""The last section of the guide on SFT, then GRPO on its output, which vLLM serves and the trainer agrees with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_api.common import metric_names as names
from example_trainer.monitoring.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[2]
GRPO = (
    "-m example_trainer.run --config configs/demo.yaml --model-name sums/final_model --training-steps 2 --run-dir grpo"
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("ATROPOS_TUTORIAL" not in os.environ, reason="takes minutes; ATROPOS_TUTORIAL=1 runs it"),
]


def test_the_model_that_the_guide_fine_tunes_is_trained_with_grpo(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/sft.md").read_text(encoding="utf-8")
    block = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[-1].replace(
        "atropos-sft", "python -m example_trainer.sft"
    )
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    for command in (["bash", "-ec", block], [sys.executable, *GRPO.split()]):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=variables, timeout=1200
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    losses = [row[names.TRAIN_LOSS] for row in read_metrics(tmp_path / "sums/metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    steps = read_metrics(tmp_path / "grpo/metrics.jsonl")
    assert len(steps) == 2
    assert all(row[names.ALIGNMENT_DIFF_MAX] < 1e-4 for row in steps)
