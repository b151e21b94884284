"""Checks of the tests that are named for a promise: they exist, assert something, and are not skipped.

`Observer` is a plugin of every session: it fails a session in which a named test was collected and only skipped. Only
pytest is imported here, as `make gpu` needs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
LISTS = {
    "PITFALLS": TESTS / "unit/project/test_pitfalls.py",
    "ELSEWHERE": TESTS / "unit/trainer/flags_elsewhere.py",
}
"""Mappings of a promise to the names of its tests, or to a path and a name, as literals."""


@cache
def read_list(name: str) -> dict[str, tuple[str, ...]]:
    """Return the promises of a list, each with the names of its tests, without paths."""
    for node in ast.parse(LISTS[name].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            assert node.value is not None
            found: dict[str, str | tuple[str, ...]] = ast.literal_eval(node.value)
            return {promise: (tests,) if isinstance(tests, str) else tests for promise, tests in found.items()}
    raise LookupError(f"{LISTS[name]} has no {name}")


def promised_tests() -> frozenset[str]:
    """Return the names of all functions that test a promise."""
    return frozenset(test.rpartition("::")[2] for name in LISTS for tests in read_list(name).values() for test in tests)


def source_of(path: Path, test: str) -> str:
    """Return the test in `path` with all that it uses there: fixtures, helpers, tables of cases."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, ast.AST] = {}
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        known |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    known |= {node.name: node for node in ast.walk(module) if isinstance(node, definitions)}
    if test not in known:
        raise LookupError(f"{path} has no {test}")
    reached: dict[str, str] = {}
    waiting = [test]
    while waiting:
        name = waiting.pop()
        if name in known and name not in reached:
            reached[name] = ast.unparse(known[name])
            waiting += [inner.id for inner in ast.walk(known[name]) if isinstance(inner, ast.Name)]
            waiting += [inner.arg for inner in ast.walk(known[name]) if isinstance(inner, ast.arg)]
    return "\n".join(reached.values())


def asserts_something(source: str) -> bool:
    return any(word in source for word in ("assert ", "pytest.raises", ".assert_close", ".assert_allclose"))


class Observer:
    """Records the outcome of each named test in this session."""

    def __init__(self, promised: frozenset[str]) -> None:
        self._promised = promised
        self._ends: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if name in self._promised and (report.when == "call" or report.outcome != "passed"):
            self._ends[name].add(report.outcome)

    def skipped(self) -> list[str]:
        """Return the named tests of which nothing ran."""
        return sorted(name for name, ends in self._ends.items() if ends == {"skipped"})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        if self.skipped() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name in self.skipped():
            terminalreporter.write_line(f"FAILED {name} keeps a promise and was only skipped: nothing was observed")
