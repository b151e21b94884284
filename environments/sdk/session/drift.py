"""Chats whose history is no longer what was sampled: counted, and told once with the place where they differ."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 40


class DriftLog:
    """Shared by the sessions of an environment, so that the same mistake is not told a thousand times."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, sampled: str, given: str, why: str) -> None:
        self.count += 1
        level = logging.WARNING if self.count == 1 else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        at = first_difference(sampled, given)
        shown = slice(max(0, at - SHOWN_CHARACTERS // 2), at + SHOWN_CHARACTERS)
        logger.log(
            level,
            "a chat's next turn does not continue what was sampled: %s differs from character %d on, where %r was "
            "sampled and %r is given; it becomes a sequence of its own (told once, counted as server/drifted_chats)",
            why,
            at,
            sampled[shown],
            given[shown],
        )


def first_difference(one: str, other: str) -> int:
    """Where two texts part; the shorter one's end if it begins the other."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
