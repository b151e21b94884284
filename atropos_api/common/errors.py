"""The root of every error that a user of the command line reads, and the exit codes of a program that ends with one.

It is a module of its own because every package derives errors from it, so it must import nothing of them.
"""

from __future__ import annotations

from typing import Final

REFUSED: Final = 2
"""Exit code of a program that a new start with the same settings would end in the same way."""

OUTAGE: Final = 75
"""Exit code, EX_TEMPFAIL, of a program that ends because another did not answer: a later start may go on."""


class AtroposError(Exception):
    """An error for the user: it names the cause, the offending value and the next step, in one line on stderr."""


class Outage(AtroposError):
    """A program ends because another one does not answer; a later start of it may go on."""
