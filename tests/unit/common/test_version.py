"""Every command and verb answers `--version` with one line and exit code 0, before it does anything else."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from atropos_api.common.identity import DISTRIBUTION, NOT_INSTALLED, package_version, version_line

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = (
    "atropos_api",
    "environments.arithmetic_server",
    "environments.compat",
    "environments.commands",
    "environments.scaffold",
    "example_trainer.grpo",
    "example_trainer.run",
    "example_trainer.tiny",
)
WITH_A_VERB = (
    ("atropos", "top"),
    ("atropos", "env", "init"),
    ("atropos", "replay"),
    ("atropos", "sft"),
    ("atropos-grpo-run", "--env", "my_env.py"),
)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("words", [*((name,) for name in PROJECT["scripts"]), *WITH_A_VERB], ids=" ".join)
def test_a_console_script_prints_its_version(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, function = PROJECT["scripts"][words[0]].split(":")
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{words[0]}", *words[1:], "--version"])
    with pytest.raises(SystemExit) as ended:
        getattr(import_module(module), function)()
    assert ended.value.code == 0
    assert re.fullmatch(rf"{words[0]} \(atropos-grpo\) \S+\n", printed(capsys))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_run_prints_its_version(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--version"])
    spec = find_spec(module)
    assert spec is not None
    run = f"{module}.__main__" if spec.submodule_search_locations else module
    monkeypatch.delitem(sys.modules, run, raising=False)  # otherwise runpy warns that other tests have imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert re.fullmatch(r"\S+ \(atropos-grpo\) \S+\n", printed(capsys))


def test_the_version_is_that_of_the_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {DISTRIBUTION: "1.2.3"}.__getitem__)
    assert version_line("run-api") == "run-api (atropos-grpo) 1.2.3"
    assert PROJECT["name"] == DISTRIBUTION


def test_a_source_tree_that_was_never_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert package_version() == NOT_INSTALLED
