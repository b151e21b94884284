"""The findings of `atropos doctor` and the form in which they are printed: every check and every report uses them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "warning", "error"]
TEXT_WIDTH = 100
_INDENT = " " * 25


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: the subject, the fault with the offending value, and what to do about it."""

    verdict: Verdict
    subject: str
    text: str
    advice: str = ""


def error(subject: str, text: str, advice: str) -> Finding:
    """Return a fault with which the run cannot work, or cannot learn."""
    return Finding("error", subject, text, advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a fault with which the run works, though perhaps not as intended."""
    return Finding("warning", subject, text, advice)


def as_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the printed lines of findings: the fault, and below it what to do."""
    for finding in findings:
        lines = textwrap.wrap(finding.text, TEXT_WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{finding.verdict:9}{finding.subject:16}{lines[0]}"
        yield from (f"{_INDENT}{line}" for line in lines[1:])
        if finding.advice:
            yield f"{_INDENT}do: {finding.advice}"


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if there is an error, else 0."""
    return 1 if any(finding.verdict == "error" for finding in findings) else 0


def counted(findings: Iterable[Finding]) -> str:
    """Return the numbers of errors and warnings in words."""
    counts = Counter(finding.verdict for finding in findings)
    words = [f"{count} {name}{'s' * (count != 1)}" for name in ("error", "warning") if (count := counts[name])]
    return ", ".join(words) or "nothing wrong was found"
