"""The root of every error that a user of the command line reads.

It stands alone because every package derives errors from it, so it must import nothing.
"""

from __future__ import annotations


class AtroposError(Exception):
    """An error for the user: it names the cause, the offending value and the next step, in one line on stderr."""
