"""The root of every error that a person at the command line is meant to read."""

from __future__ import annotations


class AtroposError(Exception):
    """The message names the cause, the offending value and the next step; command lines print it as one line."""
