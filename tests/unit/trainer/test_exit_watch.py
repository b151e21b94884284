"""The trainer's process ends, whatever its threads do."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

from example_trainer.cli import StopFlag

HANGING = """
import sys, threading, time
from example_trainer.cli import ensure_exit

def forever():
    while True:
        time.sleep(0.05)

threading.Thread(target=forever, name="upload-logs").start()
ensure_exit(7, patience_seconds=0.5)
sys.exit(7)
"""
ORDERLY = """
import sys, threading, time
from example_trainer.cli import ensure_exit

threading.Thread(target=time.sleep, args=(0.2,)).start()
ensure_exit(7, patience_seconds=30)
sys.exit(7)
"""
CALLED = """
import time
from example_trainer.cli import ensure_exit

ensure_exit(7, patience_seconds=0.2)
time.sleep(0.8)
print("went on")
"""

INTERRUPTED = """
import signal, sys
from example_trainer.cli import StopFlag

def hang_up_again(frame, event, argument):
    if event == "line":
        signal.raise_signal(signal.SIGHUP)
    return hang_up_again

stop = StopFlag()
stop.training = True
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with stop.listening():
    sys.settrace(hang_up_again)
    signal.raise_signal(signal.SIGHUP)
    sys.settrace(None)
print(stop.is_set())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_thread_that_never_ends_is_named_with_its_place_and_left_behind() -> None:
    ended = run(HANGING)
    assert ended.returncode == 7
    assert "upload-logs: <string>" in ended.stderr
    assert "in forever" in ended.stderr


def test_a_process_that_can_end_does_so_at_once_and_in_silence() -> None:
    started = time.monotonic()
    ended = run(ORDERLY)
    assert (ended.returncode, ended.stderr) == (7, "")
    assert time.monotonic() - started < 25


def test_a_caller_that_goes_on_after_the_command_is_left_alone() -> None:
    """A process of tests once ended in the middle of another test, with code 0, 20 s after `atropos-grpo --version`."""
    ended = run(CALLED)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


def test_a_terminal_that_is_closed_stops_the_training_in_order_and_nohup_does_not():
    """SIGHUP killed a trainer that was started by hand, and the steps since its last checkpoint were lost."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if the tests themselves run under nohup
    stop = StopFlag()
    try:
        with stop.listening():
            stop.training = True
            signal.raise_signal(signal.SIGHUP)
            assert (stop.is_set(), stop.signal_number) == (True, signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)  # the end of the session: still in order
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop.listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_in_the_middle_of_the_handling_of_one_stop_the_training_in_order() -> None:
    """A closed terminal and its shell send two at once, and the second waited for a lock that the first held."""
    ended = run(INTERRUPTED)
    assert (ended.returncode, ended.stdout) == (0, "True\n")
