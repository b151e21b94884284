"""Logging for the command lines: one line per event, as plain text or as JSON. Libraries only create loggers."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from atropos_api.common.secrets import redact_text

WINDOW_SECONDS: Final = 10.0
MOST_ALIKE: Final = 20
MOST_KINDS: Final = 1000
DATE_FORMAT: Final = "%Y-%m-%d %H:%M:%S"
CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}


class _TextFormatter(logging.Formatter):
    """A formatter with one line per record: text from outside can neither begin a line nor colour the terminal.

    Tokens and passwords in addresses and headers are masked, in tracebacks too.
    """

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = record.message.rstrip().translate(CONTROL_CHARACTERS)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    """A formatter with one JSON object per record: a run's logs can be searched by field."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: redact_text(str(value)) for name, value in event.items()})


class _Sparing(logging.Filter):
    """A filter that bounds warnings: `MOST_ALIKE` of a kind pass in `WINDOW_SECONDS`, the rest are counted."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.msg)
        began_at, count = self._windows.get(kind, (record.created, 0))
        if record.created - began_at > WINDOW_SECONDS:
            left_out = count - MOST_ALIKE
            if left_out > 0:
                record.msg = f"{record.msg} (and {left_out} more like this before)"
            began_at, count = record.created, 0
        if len(self._windows) >= MOST_KINDS:
            self._windows.clear()
        self._windows[kind] = (began_at, count + 1)
        return count < MOST_ALIKE


def setup_logging(name: str, *, level: str = "INFO", json_lines: bool = False) -> None:
    """Send this process's log records to stderr, each marked with the process's `name`."""
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s {name} %(levelname).1s %(message)s"
    handler.setFormatter(_JsonFormatter() if json_lines else _TextFormatter(text, datefmt=DATE_FORMAT))
    handler.addFilter(_Sparing())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore"):
        # One line per request would bury everything else: the environments poll many times a second.
        logging.getLogger(chatty).setLevel(logging.WARNING)
