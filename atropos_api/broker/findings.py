"""The findings of a diagnosis: each says what a run waits for, how bad that is, and on which edge of the flow.

This is a module of its own because `diagnosis` and `starting` both make findings.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

EdgeName = Literal["environment-inference", "inference-broker", "broker-trainer", "trainer-publish"]
Severity = Literal["blocked", "slow", "ok"]

EDGES: Final[tuple[EdgeName, ...]] = get_args(EdgeName)

HARMLESS_UNLESS_WAITED_FOR: Final = frozenset({"tool", "straggler"})
"""Rules whose findings are only notes of a diagnosis, never its main finding, while the trainer has enough to train."""


class Finding(msgspec.Struct, kw_only=True):
    """A finding: it says what the run waits for, and what may help."""

    rule: str
    severity: Severity
    headline: str
    edge: EdgeName | None = None
    """The edge of the flow on which nothing moves, or less than elsewhere; None if the cause is not at one edge."""
    detail: str = ""
    advice: str = ""
    seconds: float | None = None
    """Time for which it has lasted, if that is known."""


class Diagnosis(msgspec.Struct, kw_only=True):
    """The most important finding, and the others that apply."""

    finding: Finding
    notes: list[Finding]
