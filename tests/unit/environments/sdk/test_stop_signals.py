"""Signals that ask an environment to stop, one in the middle of another's handling."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import faulthandler, signal, sys
from environments.sdk.runtime import stopping

faulthandler.dump_traceback_later(30, exit=True)
stopping.SECOND_SIGNAL_GRACE_SECONDS = 60.0

def signal_again(frame, event, argument):
    if event == "line" and frame.f_code.co_name in {"handle_signal", "set_grace", "cancel", "set"}:
        signal.raise_signal(signal.SIGTERM)
    return signal_again

with stopping.listen_for_stop() as stop:
    stop.grace_seconds = 60.0
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(signal_again)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
print(stop.count > 2)
"""


def test_signals_in_the_middle_of_the_handling_of_one_neither_fail_nor_block() -> None:
    """The timer of the first one was begun twice, or its lock was waited for, which the interrupted handler held."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
