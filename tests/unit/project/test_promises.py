"""Lists of promises name tests that set the option, assert its effect and run; a name alone proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.promises import LISTS, Observer, asserts_something, promised_tests, read_list, source_of
from tests.unit.trainer.flags_elsewhere import ELSEWHERE

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_a_flag_that_is_watched_elsewhere_is_set_and_asserted_on_there(flag: str) -> None:
    path, _, name = ELSEWHERE[flag].partition("::")
    source = source_of(ROOT / path, name)
    assert asserts_something(source)
    assert flag in source or flag.replace("_", "-") in source, f"{ELSEWHERE[flag]} sets no --{flag.replace('_', '-')}"


def test_every_list_can_be_read_and_is_watched() -> None:
    assert all(read_list(name) for name in LISTS)
    assert {
        "test_a_device_that_is_not_there_is_one_clear_line",
        "test_updates_far_below_the_spacing_are_kept_on_average_where_nearest_rounding_loses_them",
    } <= promised_tests()


def report(name: str, outcome: str, *, when: str = "call", case: str = "") -> Any:
    return pytest.TestReport(
        nodeid=f"tests/unit/test_x.py::{name}{case}",
        location=("tests/unit/test_x.py", 1, name),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=None,
        when=when,  # type: ignore[arg-type]
    )


class Session:
    def __init__(self, exitstatus: int) -> None:
        self.exitstatus = exitstatus


def test_a_session_in_which_a_promise_was_only_skipped_has_failed() -> None:
    observer = Observer(frozenset({"test_kept", "test_partly", "test_skipped", "test_not_collected"}))
    for seen in (
        report("test_kept", "passed", when="setup"),
        report("test_kept", "passed"),
        report("test_partly", "skipped", when="setup", case="[a]"),
        report("test_partly", "passed", case="[b]"),
        report("test_skipped", "skipped", when="setup"),
        report("test_skipped", "passed", when="teardown"),
        report("test_of_no_promise", "skipped", when="setup"),
    ):
        observer.pytest_runtest_logreport(seen)
    assert observer.skipped() == ["test_skipped"]
    for before, after in ((0, 1), (2, 2)):
        session = Session(before)
        observer.pytest_sessionfinish(session)
        assert session.exitstatus == after


def test_this_session_is_observed(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.has_plugin("promises")
