"""The record of a stage of `make test-all`, and the pytest plugin that writes it.

The record is a file with one JSON object a line: the commit, then the beginning of each call of pytest and each test as
it ends. A call at the same commit leaves out what has passed before, so that hours of tests may be interrupted. Beside
it is a file with the tracebacks, since pytest prints them only when all tests of the stage have ended.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

WORST_FIRST = ("error", "failed", "skipped", "passed")


class Record:
    """The outcomes of one stage's tests at one commit; at another one the file is begun anew."""

    def __init__(self, path: Path, commit: str = "") -> None:
        self._path = path
        self._tracebacks = path.with_suffix(".failed.txt")
        self.outcomes: dict[str, tuple[str, str]] = {}
        """By test: the outcome, and the reason of a skip."""
        self.seconds = 0.0
        """The time of all calls; of an interrupted one, until the last test that ended."""
        self.is_complete = False
        """True if the last call ended, and nothing had failed."""
        lines = self._read()
        if lines and (not commit or lines[0]["commit"] == commit):
            self._take(lines[1:])
        else:
            path.write_text(json.dumps({"commit": commit}) + "\n")
            self._tracebacks.unlink(missing_ok=True)

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome for outcome, _ in self.outcomes.values())

    @property
    def skips(self) -> Counter[str]:
        """The number of skipped tests by reason."""
        return Counter(reason for outcome, reason in self.outcomes.values() if outcome == "skipped")

    def passed(self) -> list[str]:
        return [test for test, (outcome, _) in self.outcomes.items() if outcome == "passed"]

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, and the time."""
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"at": time.time()}) + "\n")

    def add_traceback(self, test: str, text: str) -> None:
        """Append why a test has failed to the file beside the record."""
        with self._tracebacks.open("a", encoding="utf-8") as file:
            file.write(f"{test}\n{text}\n\n")

    def _read(self) -> list[dict[str, Any]]:
        """Return the lines; half a one at the end, of a call that was killed, is cut off."""
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._path.write_text(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, lines: list[dict[str, Any]]) -> None:
        self.is_complete = bool(lines) and "ended" in lines[-1]
        before = 0.0
        ran: set[str] = set()
        for line in lines:
            if "test" not in line:
                before, ran = line["at"], set()
                continue
            self.seconds, before = self.seconds + line["at"] - before, line["at"]
            test, outcome = line["test"], line["outcome"]
            # A test may end twice in one call, as when it passes and its fixture fails; a later call counts anew.
            if test not in ran or WORST_FIRST.index(outcome) < WORST_FIRST.index(self.outcomes[test][0]):
                self.outcomes[test] = (outcome, line["reason"])
            ran.add(test)


class Recorder:
    """The plugin of the process that collects the results."""

    def __init__(self, record: Record) -> None:
        self._record = record

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = self._record.passed()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._add(report, "error" if report.outcome == "failed" and report.when != "call" else report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # a module that is skipped as a whole, or cannot be imported
            self._add(report, "error" if report.outcome == "failed" else report.outcome)

    def _add(self, report: pytest.TestReport | pytest.CollectReport, outcome: str) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        self._record.add({"test": report.nodeid, "outcome": outcome, "reason": reason.removeprefix("Skipped: ")})
        if outcome not in {"passed", "skipped"}:
            self._record.add_traceback(report.nodeid, report.longreprtext)


class LeaveOut:
    """The plugin of each process that runs tests: it deselects those that have passed."""

    def __init__(self, passed: list[str]) -> None:
        self._passed = frozenset(passed)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if item.nodeid in self._passed]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item.nodeid not in self._passed]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="the record of the stage, which exists")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(LeaveOut(worker["passed"]))
        return
    record = Record(config.getoption("record"))
    record.add({"began": True})
    config.pluginmanager.register(Recorder(record))
    config.pluginmanager.register(LeaveOut(record.passed()))
