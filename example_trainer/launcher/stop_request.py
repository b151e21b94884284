"""Signals that ask a launch to stop: the first one is remembered, and raised as `Interrupted` where a stop is safe.

A second one asks that the stop should not wait for the trainer's last checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from example_trainer.errors import TrainerError

REPEATED_AFTER_SECONDS = 1.0
"""A signal sooner after the first is the same request: a terminal and a program between may each pass it on."""


class Interrupted(TrainerError):
    """Raised when a signal has asked the launch to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(slots=True)
class StopRequest:
    """Remembers the first signal that asks the launch to stop; `raise_if_requested` is called between checks."""

    number: int | None = None
    noted_at: float = 0.0
    is_urgent: bool = False
    """True once a second signal has come."""

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[StopRequest]:
        """Handle SIGINT, SIGTERM and SIGHUP while the block runs, then restore the previous handlers.

        A SIGHUP that was ignored stays so: `nohup` asks for a run that outlives its terminal.
        """
        request = cls()
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [signal.SIGINT, signal.SIGTERM, *([] if outlives_terminal else [signal.SIGHUP])]
        before = {number: signal.signal(number, request.note) for number in numbers}
        try:
            yield request
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the form of a signal handler
        if self.number is None:
            self.number, self.noted_at = number, time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - self.noted_at > REPEATED_AFTER_SECONDS:
            self.is_urgent = True

    def raise_if_requested(self) -> None:
        if self.number is not None:
            raise Interrupted(self.number)
