"""The start of a run: for its first minutes, a part that is not there yet is waited for, and is no stall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atropos_api.broker.facts import Facts
from atropos_api.broker.findings import HARMLESS_UNLESS_WAITED_FOR, Finding

START_SECONDS: Final = 300.0
"""Time after which a start that still waits for a part is a stall: loading a model takes minutes."""

NOT_THERE_YET: Final[Mapping[str, str]] = {
    "no-run": "the trainer",
    "trainer-silent": "the trainer",
    "no-environment": "an environment",
    "inference-down": "the inference server",
}
"""Rules that find a part missing, with the part: while a run starts, none of them is a stall."""

AFTER_PUBLISH: Final = frozenset({"no-environment"})
"""Those of these rules that are no stall after the first publish either. The others are stalls from then on: the
trainer and a server were there when the first weights were published.
"""


def calm_while_starting(facts: Facts, found: list[Finding]) -> list[Finding]:
    """Return the findings; those that are usual while a run starts are replaced by one that says so.

    While a part is missing, idle inference and late groups are its consequences. With all parts there, only the wait
    for the first rollouts is usual.
    """
    start = facts.start
    if start is None or start.seconds >= START_SECONDS:
        return found
    missing = [one for one in found if one.rule in (AFTER_PUBLISH if start.published else NOT_THERE_YET)]
    usual = {one.rule for one in missing} | {"rollouts"} | (HARMLESS_UNLESS_WAITED_FOR if missing else set())
    others = [one for one in found if one.rule not in usual]
    if len(others) == len(found):
        return found
    parts = list(dict.fromkeys(NOT_THERE_YET[one.rule] for one in missing)) or ["the first rollouts"]
    starting = Finding(
        rule="starting",
        severity="ok",
        headline=f"Starting: waiting for {' and '.join(parts)}",
        detail=f"A model takes minutes to load; what is missing after {START_SECONDS / 60:.0f} minutes is a stall.",
        seconds=start.seconds,
    )
    return [starting, *others]
