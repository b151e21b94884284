"""Failpoints: named steps between a write and its answer, so that a test can kill or stop the process at each of them.

Stores, broker and HTTP call `reach(Failpoint.X)` as they go. This does nothing, unless the process was started with
`ATROPOS_CRASH_AT=<step>` (or `<step>:<n>` for the n-th time it gets there), which kills it as `kill -9` does, or with
`ATROPOS_CRASH_AT=<step>:<n>:stop`, which stops it there as `kill -STOP` does, until it gets a SIGCONT.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from atropos_api.errors import UnknownStep

CRASH_VARIABLE: Final = "ATROPOS_CRASH_AT"


class Failpoint(StrEnum):
    """The named steps. `staged`: written in the ledger's transaction; `kept`: the transaction is over."""

    STORE_OPENED = "store-opened"
    RECOVERED = "recovered"
    RUN_STAGED = "run-staged"
    RUN_KEPT = "run-kept"
    SUBMISSION_CHECKED = "submission-checked"
    SEGMENT_BEGUN = "segment-begun"
    BODIES_WRITTEN = "bodies-written"
    GROUPS_STAGED = "groups-staged"
    GROUPS_KEPT = "groups-kept"
    BODIES_SYNCED = "bodies-synced"
    LEDGER_SYNCED = "ledger-synced"
    ANSWER_BEGUN = "answer-begun"
    ANSWER_TORN = "answer-torn"
    ANSWER_ENDED = "answer-ended"
    BATCH_CHOSEN = "batch-chosen"
    BATCH_STAGED = "batch-staged"
    BATCH_KEPT = "batch-kept"
    BATCH_READ = "batch-read"
    DELIVERY_BEGUN = "delivery-begun"
    DELIVERY_TORN = "delivery-torn"
    DELIVERY_ENDED = "delivery-ended"
    COMMIT_STAGED = "commit-staged"
    COMMIT_KEPT = "commit-kept"
    BODIES_DISCARDED = "bodies-discarded"
    SEGMENT_REMOVED = "segment-removed"
    COMPACTION_COPIED = "compaction-copied"
    COMPACTION_KEPT = "compaction-kept"
    COMPACTION_ENDED = "compaction-ended"


Reach = Callable[[Failpoint], object]


ignore_failpoint: Final[Reach] = id
"""The default `reach` outside tests does nothing. It is a builtin because each submission calls it seven times."""


class SignalAt:
    """A `reach` that sends the process a signal the n-th time it reaches a step."""

    def __init__(self, step: Failpoint, nth: int = 1, number: signal.Signals = signal.SIGKILL) -> None:
        self._step = step
        self._left = nth
        self._number = number

    def __call__(self, step: Failpoint) -> None:
        if step is not self._step:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)


def read_crash_step(environment: Mapping[str, str]) -> Reach:
    """Return the `reach` that `ATROPOS_CRASH_AT` asks for; `ignore_failpoint` if it is unset."""
    asked = environment.get(CRASH_VARIABLE, "")
    name, _, how = asked.partition(":")
    nth, _, stop = how.partition(":")
    if not name:
        return ignore_failpoint
    try:
        return SignalAt(Failpoint(name), int(nth or 1), signal.SIGSTOP if stop else signal.SIGKILL)
    except ValueError as error:
        steps = ", ".join(Failpoint)
        raise UnknownStep(f"{CRASH_VARIABLE}={asked}: {error}; unset it, or write one of {steps}") from None
