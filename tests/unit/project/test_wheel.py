"""The wheel works outside the repository: programs, run files by name, and what else travels with the package."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.installed import ROOT, Installed, install_wheel

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUN_FILES = sorted((ROOT / "example_trainer/configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_packages_come_from_the_wheel(installed: Installed) -> None:
    modules = "atropos_api, environments, example_trainer"
    shown = installed.run("python", "-c", f"import {modules}\nfor module in ({modules}): print(module.__file__)")
    assert shown.returncode == 0, shown.stderr
    places = shown.stdout.split()
    assert all(Path(place).is_relative_to(installed.programs.parent) for place in places), places


def test_everything_that_is_not_python_travels_with_it(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if not name.endswith(".py") and ".dist-info/" not in name}
    packages = ("atropos_api", "environments", "example_trainer")
    files = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if path.suffix not in {".py", ".pyc"}}
    assert packed == expected


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_each_program_starts(installed: Installed, name: str) -> None:
    shown = installed.run(name, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"{name} (atropos-grpo) {PROJECT['version']}\n"), shown.stderr


@pytest.mark.parametrize("name", [path.stem for path in RUN_FILES])
def test_a_shipped_run_file_is_found_by_its_name(installed: Installed, name: str) -> None:
    model = [] if name == "demo" else ["--model-name", str(_model(installed.cwd)), "--fit", "off"]
    shown = installed.run("atropos-grpo-run", "--config", name, *model, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "\ntrainer:\n" in shown.stdout
    assert str(ROOT) not in shown.stdout.replace(str(installed.programs.parent), "")
    assert [path.name for path in installed.cwd.iterdir() if path.name != "model"] == []


def test_a_file_of_one_s_own_comes_before_a_shipped_one_of_that_name(installed: Installed) -> None:
    content = yaml.safe_load(RUN_FILES[0].read_text(encoding="utf-8"))
    content["trainer"]["training_steps"] = 17
    own = installed.cwd / RUN_FILES[0].stem
    own.write_text(yaml.safe_dump(content), encoding="utf-8")
    shown = installed.run("atropos-grpo-run", "--config", own.name, "--dry-run")
    own.unlink()
    assert "training_steps: 17" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("asked", "proposal"), [("dem", "demo"), ("configs/demo.yaml", "demo"), ("gsm8k.yml", "gsm8k")]
)
def test_a_name_that_is_neither_is_one_line_with_the_nearest(installed: Installed, asked: str, proposal: str) -> None:
    shown = installed.run("atropos-grpo-run", "--config", asked, "--dry-run")
    assert shown.returncode == 2
    (line,) = shown.stderr.splitlines()
    assert f"--config {asked}: no such file, did you mean {proposal}? These come with the package: demo, gsm8k" in line


def test_the_scaffold_of_an_environment_is_written(installed: Installed) -> None:
    shown = installed.run("atropos", "env", "init", "mine")
    assert shown.returncode == 0, shown.stderr
    assert any((installed.cwd / "mine").iterdir())


def _model(folder: Path) -> Path:
    """Return a folder that looks like a model, as far as a dry run looks."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    return model
