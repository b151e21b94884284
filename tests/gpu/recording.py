"""The fixture `record_claim`, by which a check records the value of a claim, and the file that the records go to.

`tests/gpu/run.py` names that file in `GPU_ROWS` and makes one table of the records of all files; each record is written
at once, so that none is lost if a check hangs or crashes later. Without the variable they are printed only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.claims import Claim, Value, claim_of
from tests.gpu.page import Finding, as_table, lines_of

ROWS_VARIABLE = "GPU_ROWS"
FINDINGS = pytest.StashKey[dict[str, Finding]]()
FIGURES = pytest.StashKey[list[tuple[str, str, str]]]()
REASON_LENGTH = 200


class Recorder:
    """Records values of claims; `unheld` has those that missed their bounds."""

    def __init__(self, config: pytest.Config, test: str) -> None:
        self._config = config
        self._test = test
        self.unheld: list[str] = []

    def __call__(self, claim_id: str, value: Value | None, *, reason: str | None = None) -> None:
        """Record a measured value, or with `None` the reason why the claim could not be shown here.

        A value that misses its bounds fails the test when it ends, so that further values are recorded before.
        """
        claim = claim_of(claim_id)
        if value is None:
            assert reason, f"{claim_id}: a claim that could not be shown needs a reason"
        else:
            value, reason = (bool(value) if claim.is_true else float(value)), None
        self._config.stash.setdefault(FINDINGS, {})[claim.id] = Finding(value, reason)
        write({"claim": claim.id, "value": value, "reason": reason, "test": self._test})
        if value is not None and not claim.holds(value):
            self.unheld.append(missed(claim, value))


def missed(claim: Claim, value: Value) -> str:
    return f"{claim.id}: {claim.show(value)}, must be {claim.limit} ({claim.text})"


@pytest.fixture
def record_claim(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Records the value of a claim of `claims.py`: `record_claim("one-copy", 0.02)`."""
    recorder = Recorder(request.config, request.node.name)
    yield recorder
    if recorder.unheld:
        pytest.fail("; ".join(recorder.unheld), pytrace=False)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Any:
    """Prints a figure that belongs to no claim and appears on no page, such as an absolute rate."""

    def add(what: str, found: str, wanted: str = "-") -> None:
        request.config.stash.setdefault(FIGURES, []).append((what, found, wanted))
        write({"figure": [what, found, wanted]})

    return add


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else last_line(str(report.longrepr))
        write({"test": report.nodeid, "outcome": report.outcome, "reason": reason[:REASON_LENGTH]})
    elif report.when == "call":
        write({"test": report.nodeid, "outcome": "passed", "reason": ""})


def last_line(representation: str) -> str:
    """Return the line of a traceback that names the error, without pytest's marks."""
    lines = [line.strip() for line in representation.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no reason given"])[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    findings, figures = config.stash.get(FINDINGS, {}), config.stash.get(FIGURES, [])
    if findings:
        terminalreporter.section("claims about a GPU")
        for line in lines_of(findings):
            terminalreporter.write_line(line)
    if figures:
        terminalreporter.section("figures")
        for line in as_table([("figure", "found", "expected"), *figures]):
            terminalreporter.write_line(line)


def write(record: dict[str, Any]) -> None:
    path = os.environ.get(ROWS_VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(record) + "\n")
