"""One-line faults, each with the test that has to fail on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, found once in `file`, becomes `new`; then `test` (a node id under `tests/`) fails."""

    name: str
    file: str
    old: str
    new: str
    test: str
    program: str | None = None
    """A program without which the test does nothing, so that the mutant is skipped."""
