"""Waiting for something that another process brings about: one line every ten seconds, then an error.

A reason that is still the same is not written down again: some name every place that was looked at.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from example_trainer.weights.errors import ServerUnavailable, WaitTimedOut

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.1
_LINE_SECONDS = 10.0


class NotYet(Exception):
    """Raised by what is polled, with the reason why there is nothing so far."""


def wait_for(poll: Callable[[], T], *, what: str, timeout_seconds: float) -> T:
    """Call `poll` until it returns instead of raising `NotYet`."""
    started = time.monotonic()
    next_line = started + _LINE_SECONDS
    told = ""
    while True:
        try:
            return poll()
        except NotYet as reason:
            now = time.monotonic()
            if now - started >= timeout_seconds:
                raise WaitTimedOut(
                    f"gave up on {what} after {timeout_seconds:.0f} s: {reason} (--wait-timeout sets the limit)"
                ) from reason
            if now >= next_line:
                news = "still the same" if str(reason) == told else str(reason)
                logger.info("waiting for %s (%.0f s): %s", what, now - started, news)
                next_line, told = next_line + _LINE_SECONDS, str(reason)
            time.sleep(_POLL_SECONDS)


def check_host(url: str, flag: str) -> None:
    """A host name that does not exist is a typing mistake and not worth waiting for."""
    host = urlsplit(url).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        raise ServerUnavailable(
            f"{flag} {host}: there is no such host ({error.strerror}); check the spelling"
        ) from error
