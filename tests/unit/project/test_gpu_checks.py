"""`make gpu` runs where torch, transformers and peft are all there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from example_trainer.testing import make_tiny_model

REPOSITORY = Path(__file__).resolve().parents[3]
ABSENT = (
    "aiohttp",
    "blake3",
    "fastapi",
    "msgspec",
    "orjson",
    "prometheus_client",
    "pydantic",
    "uvicorn",
    "vllm",
    "wandb",
)
IMPORT_ALL = f"""
import importlib.util, sys
from pathlib import Path
for name in {ABSENT}:
    sys.modules[name] = None  # an import of it fails as if it were not installed
for path in sorted(Path("tests/gpu").glob("*.py")):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
from example_trainer.model import PolicyOptions, load_policy
load_policy(PolicyOptions(model_name=sys.argv[1], dtype="bfloat16", device="cpu"))
"""


def test_the_checks_for_a_gpu_need_nothing_beyond_torch_transformers_and_peft(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, str(make_tiny_model(tmp_path))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
