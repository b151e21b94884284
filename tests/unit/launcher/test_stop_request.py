"""The first signal asks a launch to stop; a second one, later than a repeat of the first, makes the stop urgent."""

from __future__ import annotations

import signal

import pytest

from example_trainer.launcher import stop_request
from example_trainer.launcher.stop_request import REPEATED_AFTER_SECONDS, Interrupted, StopRequest


@pytest.mark.parametrize(
    ("second", "after_seconds", "is_urgent"),
    [
        (signal.SIGINT, REPEATED_AFTER_SECONDS + 0.1, True),
        (signal.SIGTERM, REPEATED_AFTER_SECONDS + 0.1, True),
        (signal.SIGINT, 0.1, False),
        (signal.SIGHUP, REPEATED_AFTER_SECONDS + 0.1, False),
    ],
)
def test_a_second_signal_makes_the_stop_urgent_but_neither_a_copy_of_the_first_nor_a_lost_terminal(
    monkeypatch: pytest.MonkeyPatch, second: signal.Signals, after_seconds: float, is_urgent: bool
) -> None:
    now = 100.0
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now)
    with StopRequest.listening() as stop:
        stop.raise_if_requested()
        signal.raise_signal(signal.SIGINT)
        now += after_seconds
        signal.raise_signal(second)
    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        stop.raise_if_requested()
    assert stop.is_urgent is is_urgent
