"""`make test-all` is complete: it selects every long form, and every test folder is in a stage."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests import nightly

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


def test_a_stage_that_passed_is_not_run_again_at_the_same_commit(tmp_path: Path) -> None:
    result = nightly.Result("runs", 61.5, 0, Counter(passed=3, skipped=1), Counter({"needs an NVIDIA GPU": 1}))
    result.save(tmp_path, "3f2a")
    assert nightly.Result.load(tmp_path, "runs", "3f2a") == result
    assert nightly.Result.load(tmp_path, "runs", "77b0") is None
    assert nightly.Result.load(tmp_path, "unit", "3f2a") is None
