"""The plugin of vLLM's processes: each records its fatal error, ends with its parent, and gets the server's additions.

vLLM writes an engine's exception only to the log, so each of vLLM's processes writes the exception that ended it to a
file that the server has named, and the server's own error line reports it. vLLM's engine core does not watch its parent
and would keep its memory and port for ever, so the kernel kills each child when its parent ends, even by SIGKILL. vLLM
calls `register` in each process that it starts (entry point group `vllm.general_plugins`), so this module stays small
and imports vLLM only where the additions to its engine core are installed: in a process of the server's own. A forked
process inherits them and calls no plugin again; it calls `die_with_parent` itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from example_trainer.processes.die_with_parent import die_with_parent
from example_trainer.processes.program_log import signal_name

_VARIABLE = "ATROPOS_ENGINE_CAUSE"
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_LONGEST = 500


class _LastErrorFilter(logging.Filter):
    """Lets every record pass, and writes the exception of each logged error to a file, over the one before.

    It is not a handler, because the engine configures logging again, which removes handlers and keeps filters.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.levelno >= logging.ERROR:
            with contextlib.suppress(OSError):
                self._path.write_text(one_line(f"{type(error).__name__}: {error}"), encoding="utf-8")
        return True


def ask_for_cause(environ: MutableMapping[str, str], boot_id: str) -> Path:
    """Make the processes started from here write why they end; return the path of the file, which they create."""
    path = Path(tempfile.gettempdir()) / f"atropos-{boot_id}-cause"
    environ[_VARIABLE] = str(path)
    return path


def note_cause() -> None:
    """Make a process of vLLM write the exception that ends it, if the server has named a file."""
    named = os.environ.get(_VARIABLE)
    for name in _LOGGERS if named else ():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _LastErrorFilter) for known in logger.filters):
            logger.addFilter(_LastErrorFilter(Path(named or "")))


def read_cause(path: Path) -> str | None:
    """Return the recorded cause, and remove the file."""
    try:
        text = path.read_text(encoding="utf-8")
        path.unlink()
    except OSError:
        return None
    return text or None


def how_ended(processes: list[Any]) -> str:
    """Return the cause of the engine processes' end, as far as their exit codes show it."""
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    killed = [signal_name(-code) for code in codes if code < 0]
    if killed:
        return f"its process was killed by {killed[0]}"
    return f"its process ended with exit code {codes[0]}" if codes else "it does not answer"


def one_line(text: str) -> str:
    """Return an error's text on one line; vLLM's may include many lines of configuration."""
    return " ".join(text.split())[:_LONGEST]


def register() -> None:
    """Make a child process of vLLM end with its parent and write why it ends; has no effect in the server itself.

    A child of the server that was not forked from it also gets the additions to vLLM's engine core; a forked one has
    them from its parent.
    """
    note_cause()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    die_with_parent(parent.pid)
    if os.environ.get(_VARIABLE):
        from example_trainer.serving.vllm import engine_core

        engine_core.install()
