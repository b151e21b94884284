"""The repository keeps its own rules: imports point one way, and texts name no machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_imports_point_one_way() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stdout


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_torch_is_imported_under_the_trainer_alone() -> None:
    for package in ("atropos_api", "environments"):
        for path in (ROOT / package).rglob("*.py"):
            assert "import torch" not in path.read_text(), path


def test_the_trainers_requirements_file_installs_this_project_from_its_root() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-build-isolation", "--quiet"]
    result = subprocess.run(
        [*command, "--report", "-", "-r", "example_trainer/requirements.txt"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert '"name": "atropos-grpo"' in result.stdout
