"""`make test-all` is complete: it selects every long form, and every test folder is in a stage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly_record import Record

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
ASKED = re.compile(
    r'(?:environ(?:\.get)?[\[(]|in os\.environ).{0,3}"(ATROPOS_[A-Z_]+)"|"(ATROPOS_[A-Z_]+)" (?:not )?in os\.environ'
)
NOT_FORMS = {
    # The product's own variables, which tests set and read, and the pace of tests on a slow machine.
    "ATROPOS_TOKEN",
    "ATROPOS_BRIDGE_TOKEN",
    "ATROPOS_CACHE",
    "ATROPOS_SERVER_SOCKETS",
    "ATROPOS_KILLS_PATIENCE",
    # The number of steps in an example of the state machine; more steps do not find more.
    "ATROPOS_PROPERTY_STEPS",
}


def test_every_long_form_is_asked_for() -> None:
    asked = {name for path in TESTS.rglob("*.py") for pair in ASKED.findall(path.read_text()) for name in pair if name}
    assert asked - NOT_FORMS == set(nightly.LONG)


def test_every_folder_of_tests_is_in_a_stage() -> None:
    named = {ROOT / name for stage in nightly.STAGES for name in stage.tests}
    missed = [
        path.relative_to(ROOT)
        for path in TESTS.rglob("test_*.py")
        if path.parent.name != "gpu" and not named & {path, *path.parents}
    ]
    assert missed == []
    assert all(path.exists() for path in named)


def test_what_make_test_leaves_out_is_what_contributing_says_test_all_runs() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## What is left out\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert all(len(row) == 4 and row[1].strip() for row in rows)
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    packages = [re.split(r"[<>=]", package)[0] for stage in nightly.STAGES for package in stage.packages]
    forms = [f"{name}={value}" for name, value in nightly.LONG.items()]
    assert sorted(told) == sorted([*forms, *nightly.SYSTEM_PACKAGES.values(), *packages])


def test_a_skip_without_a_known_reason_is_a_failure() -> None:
    result = nightly.Result("stage", 1.0, 0)
    result.skips.update(["takes minutes; ATROPOS_KILLS=all runs it", "needs an NVIDIA GPU"])
    assert result.unexpected == ["takes minutes; ATROPOS_KILLS=all runs it"]


THREE_TESTS = """
import os, pytest
def test_one(): open("ran", "a").write("one ")
def test_two():
    open("ran", "a").write("two ")
    assert "MENDED" in os.environ
@pytest.mark.skip("needs an NVIDIA GPU")
def test_three(): pass
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["one-process", "xdist"])
def test_a_second_call_at_the_same_commit_runs_what_has_not_passed(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    path = tmp_path / "record.jsonl"

    def call(**environ: str) -> Record:
        Record(path, "3f2a")
        command = [sys.executable, "-m", "pytest", "-p", "tests.nightly_record", "--record", str(path), *workers]
        command += ["--rootdir", str(tmp_path), str(tmp_path / "test_three.py")]
        own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run(command, cwd=tmp_path, env=os.environ | own | environ, stdout=subprocess.DEVNULL, check=False)
        return Record(path, "3f2a")

    assert call().counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert 'assert "MENDED" in os.environ' in (tmp_path / "record.failed.txt").read_text()
    with path.open("a") as file:
        file.write('{"test": "test_three.py::test_o')  # as a kill leaves it
    record = call(MENDED="1")
    assert record.counts == {"passed": 2, "skipped": 1}
    assert record.skips == {"needs an NVIDIA GPU": 1}
    assert record.seconds > 0
    assert (tmp_path / "ran").read_text() == "one two two "
    assert Record(path, "77b0").counts == {}
    assert not (tmp_path / "record.failed.txt").exists()


def test_a_test_that_passes_and_whose_fixture_fails_is_an_error(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl", "3f2a")
    record.add({"began": True})
    for outcome in ("passed", "error"):
        record.add({"test": "test_one", "outcome": outcome, "reason": ""})
    assert Record(tmp_path / "record.jsonl", "3f2a").counts == {"error": 1}
    record.add({"began": True})
    record.add({"test": "test_one", "outcome": "passed", "reason": ""})
    assert not Record(tmp_path / "record.jsonl", "3f2a").is_complete
    record.add({"ended": True})
    assert Record(tmp_path / "record.jsonl", "3f2a").is_complete
