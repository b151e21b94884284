"""Runs a program that the kernel kills when the process that started it exits.

Called as `python die_with_parent.py PARENT_PID program ...`. It is a program of its own and not a `preexec_fn`,
because trainers have threads, and code between fork and exec may then deadlock. It becomes the program by exec (same
process id), so no extra process remains to be waited for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent_pid, program = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent exited before prctl took effect
        sys.exit(1)
    os.execv(program[0], program)  # noqa: S606  its arguments are a list


if __name__ == "__main__":
    main(sys.argv[1:])
