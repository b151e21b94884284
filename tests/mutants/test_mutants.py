"""Each one-line mutant fails the test that promises otherwise.

The default run tries one slice of them, chosen by the commit, so that a week of commits tries them all;
ATROPOS_CODE_MUTANTS=all tries them all at once, and ATROPOS_CODE_MUTANTS=broker,store those of some areas.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .adapters import ADAPTERS
from .bridges import BRIDGES
from .broker import BROKER
from .drain import DRAIN
from .fence import FENCE
from .float16 import FLOAT16
from .launcher import LAUNCHER
from .mutant import Mutant
from .objective import OBJECTIVE
from .sandbox import SANDBOX
from .store import STORE
from .training import TRAINING

ROOT = Path(__file__).resolve().parents[2]
AREAS: dict[str, tuple[Mutant, ...]] = {
    "adapters": ADAPTERS,
    "bridges": BRIDGES,
    "broker": BROKER,
    "fence": FENCE + DRAIN,
    "float16": FLOAT16,
    "launcher": LAUNCHER,
    "objective": OBJECTIVE,
    "sandbox": SANDBOX,
    "store": STORE,
    "training": TRAINING,
}
LEAST = {
    "adapters": 20,
    "bridges": 22,
    "broker": 22,
    "fence": 22,
    "float16": 12,
    "launcher": 22,
    "objective": 35,
    "sandbox": 40,
    "store": 22,
    "training": 25,
}
SLICES = 16  # with 40 commits a week the chance that one slice is never chosen is 8 %
TESTS_FAILED = 1
TIMEOUT_SECONDS = 1800

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)
CONFIGURATION = "[pytest]\naddopts = --import-mode=importlib\n"
PACKAGES = ("atropos_api", "environments", "example_trainer", "configs", "docs", "tests")


def slice_of_this_commit() -> int:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(asked.stdout.strip() or "0", 16) % SLICES


def of_areas(names: Iterable[str]) -> list[Mutant]:
    return [mutant for name in names for mutant in AREAS[name]]


def of_slice(number: int) -> list[Mutant]:
    return of_areas(AREAS)[number::SLICES]


def asked_for() -> list[Mutant]:
    asked = os.environ.get("ATROPOS_CODE_MUTANTS")
    if not asked:
        return of_slice(slice_of_this_commit())
    return of_areas(AREAS if asked == "all" else asked.split(","))


TRIED = asked_for()


def copy_project(root: Path) -> Path:
    """Copy the packages and the tests that must detect their mutants, without anything compiled."""
    skip = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=skip)
    shutil.copyfile(ROOT / "pyproject.toml", root / "pyproject.toml")
    (root / "pytest.ini").write_text(CONFIGURATION)
    return root


def as_job(mutant: Mutant) -> dict[str, Any]:
    nodes = [f"tests/{mutant.test}"]
    return {"name": mutant.name, "file": mutant.file, "old": mutant.old, "new": mutant.new, "nodes": nodes}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the result of each mutant, and of the unchanged project."""
    root = copy_project(tmp_path_factory.mktemp("mutants"))
    nodes = sorted({node for mutant in TRIED for node in as_job(mutant)["nodes"]})
    healthy = {"name": "healthy", "file": TRIED[0].file, "old": "", "new": "", "nodes": nodes}
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(root)}
    printed = subprocess.run(
        [sys.executable, Path(__file__).with_name("runner.py"), root],
        input=json.dumps([healthy, *map(as_job, TRIED)]),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=environ,
    ).stdout
    return {found["name"]: found for found in map(json.loads, printed.splitlines())}


def test_the_project_as_it_is_passes_the_tests_that_judge_its_mutants(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["healthy"]["code"] == 0, outcomes["healthy"]["log"]


@pytest.mark.parametrize("mutant", TRIED, ids=lambda mutant: mutant.name)
def test_a_mutant_fails_the_test_that_promises_otherwise(mutant: Mutant, outcomes: dict[str, dict[str, Any]]) -> None:
    if mutant.program is not None and shutil.which(mutant.program) is None:
        pytest.skip(f"{mutant.program} is not installed here; make test-all installs it")
    found = outcomes[mutant.name]
    assert found["code"] == TESTS_FAILED, f"{mutant.test} on {mutant.new!r}: {found['log']}"


def test_every_area_has_its_mutants_under_distinct_names() -> None:
    every = of_areas(AREAS)
    assert len({mutant.name for mutant in every}) == len(every)
    assert {area: len(mutants) >= LEAST[area] for area, mutants in AREAS.items()} == dict.fromkeys(AREAS, True)


def test_each_mutant_has_one_place_and_a_test() -> None:
    """Every run detects a renamed test or a reworded line, not only the one that tries the mutant."""
    for mutant in of_areas(AREAS):
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant
        path, _, test = mutant.test.partition("::")
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or f"def {test.partition('[')[0]}(" in source, mutant


def test_each_mutant_is_in_one_slice() -> None:
    in_slices = [mutant.name for number in range(SLICES) for mutant in of_slice(number)]
    assert sorted(in_slices) == sorted(mutant.name for mutant in of_areas(AREAS))
