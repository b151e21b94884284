"""Logging for the command lines: one line per event, as plain text or as JSON. Libraries only create loggers."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal

from atropos_api.common.secrets import redact_text

LogFormat = Literal["text", "json"]
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


Describe = Callable[[], Mapping[str, str | int | None]]
"""A function that returns what a program works on now: `run_id`, `step`, `policy_version` and the like."""


class LogContext:
    """Fields that every JSON record has in common; a program provides them with `describe` once it knows them."""

    def __init__(self) -> None:
        self._describe: Describe = dict

    def describe(self, describe: Describe) -> None:
        """Ask `describe` at each record from now on."""
        self._describe = describe

    def fields(self) -> dict[str, str | int]:
        with contextlib.suppress(Exception):  # a record must not be lost because a program is about to end
            return {name: value for name, value in self._describe().items() if value is not None}
        return {}


class _JsonFormatter(logging.Formatter):
    """A formatter with one JSON object per record: a run's logs can be searched by field."""

    def __init__(self, program: str, context: LogContext) -> None:
        super().__init__()
        self._program = program
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, str | int] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "event": record.getMessage(),
            **self._context.fields(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            {name: value if isinstance(value, int) else redact_text(value) for name, value in event.items()}
        )


class _RateLimitFilter(logging.Filter):
    """A filter that bounds warnings: `MOST_ALIKE` of a kind pass in `WINDOW_SECONDS`, the rest are counted."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.msg)
        began_at, count = self._windows.get(kind, (record.created, 0))
        if not 0 <= record.created - began_at <= WINDOW_SECONDS:  # below 0: the machine's clock was set back
            left_out = count - MOST_ALIKE
            if left_out > 0:
                record.msg = f"{record.msg} (and {left_out} more like this before)"
            began_at, count = record.created, 0
        if len(self._windows) >= MOST_KINDS:
            self._windows.clear()
        self._windows[kind] = (began_at, count + 1)
        return count < MOST_ALIKE


def setup_logging(name: str, *, level: str = "INFO", form: LogFormat = "text") -> LogContext:
    """Send this process's log records to stderr, each marked with the process's `name`."""
    handler, context = logging.StreamHandler(sys.stderr), LogContext()
    text = f"%(asctime)s {name} %(levelname).1s %(message)s"
    as_text = _TextFormatter(text, datefmt=DATE_FORMAT)
    handler.setFormatter(_JsonFormatter(name, context) if form == "json" else as_text)
    handler.addFilter(_RateLimitFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(form == "json")
    for chatty in ("httpx", "httpcore"):
        # With a line per request nothing else could be found: the environments poll many times a second.
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return context
