"""The repository keeps its own rules: imports go one way, and texts name no machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_imports_point_one_way() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stdout


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_license_file_is_the_one_that_the_project_names_and_the_changelog_knows_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert license_text.startswith(f"{project['license']} License\n")
    assert f"## {project['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_torch_is_imported_under_the_trainer_alone() -> None:
    for package in ("atropos_api", "environments"):
        for path in (ROOT / package).rglob("*.py"):
            assert "import torch" not in path.read_text(), path


@pytest.mark.parametrize("wanted", ["the lock", "the extras"])
def test_uv_pip_accepts_the_lock_and_the_extras(wanted: str, tmp_path: Path) -> None:
    """Without the builds for CPUs (`+cpu`), which another index has than the rest."""
    lock = (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "cpu.txt").write_text("\n".join(line for line in lock if "+cpu" not in line))
    asked = ["-r", str(tmp_path / "cpu.txt")] if wanted == "the lock" else ["--editable", ".[example_trainer]"]
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps", "--python", sys.executable]
    result = subprocess.run([*command, *asked], capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)
    if result.returncode != 0 and re.search("error sending request for url|Failed to fetch", result.stderr):
        pytest.skip("the package registry is not reached")
    assert result.returncode == 0, result.stderr


def test_the_trainer_starts_under_accelerate_launch() -> None:
    """Its precision and device are the trainer's defaults."""
    launch = [Path(sys.executable).parent / "accelerate", "launch", "--cpu", "--num_processes", "1"]
    trainer = ["-m", "example_trainer.grpo", "--model-name", "m", "--dry-run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [*launch, "--mixed_precision", "bf16", *trainer, "--lr", "2e-5"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
        env=environment,
    )
    assert shown.returncode == 0, shown.stderr
    settings = json.loads(shown.stdout)
    assert (settings["dtype"], settings["device"], settings["lr"]) == ("bfloat16", "cpu", 2e-5)


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
