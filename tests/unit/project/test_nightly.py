"""`make test-all` leaves nothing out: every long form is asked for and every test folder is in a stage."""

from __future__ import annotations

import re
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
    # As many steps as an example of the state machine has; more of them do not make it find more.
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


def test_a_skip_without_a_known_reason_is_a_failure() -> None:
    result = nightly.Result("stage", 1.0, 0)
    result.skips.update(["takes minutes; ATROPOS_KILLS=all runs it", "needs an NVIDIA GPU"])
    assert result.unexpected == ["takes minutes; ATROPOS_KILLS=all runs it"]
