"""No process of the server outlives it: the kernel ends each child when its parent dies, even by SIGKILL.

vLLM's engine core does not watch its parent; left alone it holds its memory and port for good. vLLM calls
`register` in each of its processes (entry point group `vllm.general_plugins`); the forked engine core calls
`die_with_parent` itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from example_trainer.serving.root_cause import note_cause

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """In a child process of vLLM: end with the parent, and note why it ends. In the server itself: nothing."""
    note_cause()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
