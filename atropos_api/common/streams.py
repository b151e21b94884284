"""The standard streams of a program, whatever its caller provides: no stream at all, an encoding with few letters, a
closed pipe.

A program that is started without a stream gets the null device in its place, so that no file or socket of its own takes
the stream's number. A letter that an encoding lacks is written as an escape.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_ERRORS_OF_WRITES = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@dataclass(frozen=True, slots=True)
class LostOutput:
    """The end of a program whose standard output cannot be written; it prints no error if a reader has left."""

    exit_code: int
    line: str = ""


def prepare_streams() -> None:
    """Open the standard streams that are closed, and make text streams accept every letter."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def can_redraw(stream: IO[str]) -> bool:
    """Return True for a terminal that moves its cursor: on one with TERM=dumb rich shows no panel before its end."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


def discard_output(stream: IO[str]) -> None:
    """Send all that is written to `stream` from now on to the null device, with what it could not write so far."""
    with suppress(OSError, ValueError):  # a stream that is not a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def lost_output(error: OSError) -> LostOutput | None:
    """Return the error with which a program ends after `error` if the standard output cannot be written, else None.

    The output is tried with an empty line, because an unbuffered one does not remember that it has failed.
    """
    if error.errno not in _ERRORS_OF_WRITES or error.filename is not None:
        return None
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        discard_output(sys.stdout)
        if again.errno == errno.EPIPE:
            return LostOutput(128 + signal.SIGPIPE)
        return LostOutput(2, f"the output cannot be written ({again.strerror})")
    return None
