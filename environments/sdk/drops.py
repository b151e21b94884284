"""Groups that were collected and not sent: counted by reason, told in the log with an example, reported to the broker.

Without this a reward that is always the same, a task that is too hard and a limit that is too small look alike from
outside: nothing is ever trained, and nothing says so.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atropos_api.wire.groups import Group
from atropos_api.wire.messages import DropReport
from environments.sdk.bell import Bell
from environments.sdk.session.nodes import NOT_TRAINED

logger = logging.getLogger(__name__)

FIRST_LINE_AFTER: Final = 8
LINE_SECONDS: Final = 30.0
LONGEST_EXAMPLE: Final = 160

EQUAL_SCORES, TOO_LONG, GROUP_SIZE = "equal-scores", "too-long", "group-size"
NO_GROUP, FAILED, TIMED_OUT = "no-group", "failed", "timed-out"
REFUSED, UNSENT = "refused", "unsent"

ADVICE: Final[Mapping[str, str]] = {
    EQUAL_SCORES: "--env.ensure_scores_are_not_same false sends them",
    TOO_LONG: "a smaller --env.max_token_length or a larger --seq-len of the trainer lets them through",
    GROUP_SIZE: "--env.group_size is what is expected; group_overrides={'group_size': n} says otherwise for a group",
    NO_GROUP: "collect_trajectories or postprocess_histories returned None for them",
    FAILED: "the warnings above say why; --env.rollout_attempts sets how often an item is tried",
    TIMED_OUT: "--env.worker_timeout sets how long a rollout may take",
    REFUSED: "the broker refused them, and says which field is wrong",
    UNSENT: "--env.drain_seconds sets how long the end may take",
}
"""What to do about each reason."""

Example = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a group is not sent: a reason that is counted, and a sentence with this group's values."""

    reason: str
    why: str


@dataclass(slots=True)
class _Kind:
    """What is known of all groups dropped for one reason."""

    count: int = 0
    why: str = ""
    example: Example | None = None


class DroppedGroups:
    """The dropped groups of one environment process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = Bell()
        self.sent = 0
        self._clock = clock
        self._session = uuid.uuid4().hex
        self._kinds: dict[str, _Kind] = {}
        self._first_at = self._told_at = float("-inf")
        self._told = self._sent_when_told = 0

    @property
    def total(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    @property
    def counts(self) -> dict[str, int]:
        return {reason: kind.count for reason, kind in self._kinds.items()}

    def note_sent(self) -> None:
        self.sent += 1

    def note(self, rejection: Rejection, example: Example | None = None, *, count: int = 1) -> None:
        """Count a dropped group; the log gets a line after the first eight, and then each half a minute."""
        kind = self._kinds.setdefault(rejection.reason, _Kind())
        if rejection.reason == EQUAL_SCORES and kind.count and kind.why != rejection.why:
            rejection = Rejection(EQUAL_SCORES, "the scores within each group are equal")
        kind.count += count
        kind.why, kind.example = rejection.why, example or kind.example
        self.changed.ring()
        now = self._clock()
        if self.total == count:
            self._first_at = now
        enough = self._told or self.total >= FIRST_LINE_AFTER
        if now - self._told_at >= LINE_SECONDS and (enough or now - self._first_at >= LINE_SECONDS):
            self._told_at = now
            self.tell()

    def tell(self) -> None:
        """Log what was dropped so far, if there is news; a warning where nothing at all has got through since."""
        if self.total == self._told:
            return
        level = logging.INFO if self.sent > self._sent_when_told else logging.WARNING
        logger.log(level, "%s", self.explain())
        self._told, self._sent_when_told = self.total, self.sent

    def explain(self) -> str:
        """How many, why, the last answer dropped for the commonest reason, and what to change."""
        if not self._kinds:
            return ""
        scored = self.total + self.sent
        ranked = sorted(self._kinds.items(), key=lambda item: -item[1].count)
        commonest, kind = ranked[0]
        groups = "1 group" if scored == 1 else f"{scored} groups"
        head = f"{self.total} of {groups} dropped" if self.sent else f"{groups} collected, all dropped"
        whys = ", ".join(f"{one.why} ({one.count})" if len(ranked) > 1 else one.why for _, one in ranked)
        shown = "" if kind.example is None else _shown(kind.example)
        return f"{head}: {whys}{shown}; {ADVICE[commonest]}"

    def report(self) -> DropReport:
        """All of it for the broker."""
        return DropReport(session=self._session, groups=self.counts, explanation=self.explain()[:2000])


def _shown(example: Example) -> str:
    try:
        return f"; {example()}"
    except Exception:  # noqa: BLE001 - an environment's own tokenizer may raise anything, and this is but an example
        return ""


def last_answer(group: Group, decode: Callable[[list[int]], str]) -> Example:
    """The last rollout's sampled text as an example, decoded only when it is shown; the rest of the group may go."""
    mask = group.masks[-1] if group.masks else []
    sampled = [int(token) for token in mask if token != NOT_TRAINED]
    return lambda: f"last answer: {quoted(decode(sampled))}"


def quoted(value: Any) -> str:
    """`value` in quotes on one line, its end where it is long: that says more of a score than how a text begins."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= LONGEST_EXAMPLE else f"…{text[-LONGEST_EXAMPLE:]}")


def one_line(text: str) -> str:
    """The beginning of a message, without its line breaks."""
    return " ".join(text.split())[:LONGEST_EXAMPLE]
