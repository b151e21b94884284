"""A program that the kernel kills when the process that started it exits.

Called as `python die_with_parent.py PARENT_PID program ...`, it becomes the program by exec (same process id), so no
extra process remains to be waited for. It is a program of its own and not a `preexec_fn`, because trainers have
threads, and code between fork and exec may then deadlock. `python -I -S` runs it by its path in 10 ms, so it imports
the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent exited before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    parent_pid, program = int(arguments[0]), arguments[1:]
    die_with_parent(parent_pid)
    try:
        os.execvp(program[0], program)  # noqa: S606  its arguments are a list
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
