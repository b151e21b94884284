"""Each one-line mutant of the objective and what feeds it fails the test that promises otherwise.

The default run tries one mutant of each idea; ATROPOS_TRAINER_MUTANTS=all tries them all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
EVERY = os.environ.get("ATROPOS_TRAINER_MUTANTS", "") == "all"
TRIED = [mutant for mutant in MUTANTS if EVERY or mutant.quick]
TESTS_FAILED = 1
TIMEOUT_SECONDS = 1800

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)
CONFIGURATION = "[pytest]\naddopts = --import-mode=importlib\n"


def copy_package(root: Path) -> Path:
    """The package, and the tests that are to find its mutants out, without anything compiled."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "example_trainer", root / "example_trainer", ignore=skip)
    shutil.copytree(ROOT / "tests" / "unit" / "trainer", root / "tests" / "unit" / "trainer", ignore=skip)
    shutil.copyfile(ROOT / "tests" / "conftest.py", root / "tests" / "conftest.py")
    (root / "pytest.ini").write_text(CONFIGURATION)
    return root


def as_job(mutant: Mutant) -> dict[str, Any]:
    nodes = [f"tests/unit/trainer/{mutant.test}"]
    return {"name": mutant.name, "file": mutant.file, "old": mutant.old, "new": mutant.new, "nodes": nodes}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of each mutant, and of the package as it is."""
    root = copy_package(tmp_path_factory.mktemp("mutants"))
    nodes = sorted({node for mutant in TRIED for node in as_job(mutant)["nodes"]})
    healthy = {"name": "healthy", "file": "example_trainer/data.py", "old": "", "new": "", "nodes": nodes}
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [sys.executable, Path(__file__).with_name("runner.py"), root],
        input=json.dumps([healthy, *map(as_job, TRIED)]),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=environ,
    ).stdout
    return {found["name"]: found for found in map(json.loads, printed.splitlines())}


def test_the_package_as_it_is_passes_the_tests_that_judge_its_mutants(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["healthy"]["code"] == 0, outcomes["healthy"]["log"]


@pytest.mark.parametrize("mutant", TRIED, ids=lambda mutant: mutant.name)
def test_a_mutant_fails_the_test_that_promises_otherwise(mutant: Mutant, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[mutant.name]
    assert found["code"] == TESTS_FAILED, f"{mutant.test} on {mutant.new!r}: {found['log']}"


def test_there_are_at_least_thirty_mutants_of_distinct_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
