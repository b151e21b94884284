"""`make demo` through vLLM on a GPU; skipped where CUDA vLLM is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.gpu.page import ROOT

DEMO = ("-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"), "--seed", "1")
LAST_CHARACTERS = 2000


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_demo_learns(tmp_path, record_claim):
    command = [sys.executable, *DEMO, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stderr or done.stdout)[-LAST_CHARACTERS:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["accuracy_base"] <= 0.15
    record_claim("vllm-demo", summary["accuracy_trained"])
