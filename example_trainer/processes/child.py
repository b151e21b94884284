"""The log of a program: for its owner's eyes alone; its last lines, and the one of them that says why it ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from example_trainer.errors import TrainerError

SHOWN_LINES = 20

_BYTES_A_LINE = 800

_SAYS_WHY = re.compile(r": error: |\b\w*(Error|Exception): ")


def open_private_log(path: Path) -> BinaryIO:
    """A log to append to, readable by this user alone: programs that are not ours may log what they were given."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def last_lines(path: Path, count: int = SHOWN_LINES) -> list[str]:
    """The end of a log, without what of its first line is not read; nothing if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _BYTES_A_LINE * count))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def reason(lines: Sequence[str]) -> str:
    """The last line that tells of an error, behind a colon; nothing if none does."""
    return next((f": {line.strip()}" for line in reversed(lines) if _SAYS_WHY.search(line)), "")


# A child that ends itself because it lost a process of its own explains the loss better than we could.
LOST_PROCESS_GRACE_SECONDS = 3.0


class ChildFailed(TrainerError):
    """A program of the run ended that should be running; the message holds its last log lines."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """How to start one program."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    ends_by_itself: bool = False
    """Exit code 0 is a success and not a loss (trainer, environments)."""
    watch_descendants: bool = True
    """Whether a long-lived process of this program that vanishes is a failure of the program."""
    restarts: int = 0
    """How often it may be started again when it has failed."""
    secret_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings that may stand in no record and no command line; they reach it in a file that is removed at the end."""


@dataclass(kw_only=True, slots=True)
class Descendant:
    """A process that a child started."""

    seen_at: float
    title: str
    is_errand: bool
    """Another program, such as a compiler, which may take long and then end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostProcess:
    """A settled process of a child that vanished while the child lived on."""

    title: str
    noticed_at: float
    size_before: int


@dataclass(kw_only=True, slots=True)
class Child:
    """A started program."""

    spec: ChildSpec
    process: subprocess.Popen[bytes]
    handle: psutil.Process
    log_path: Path
    started_at: float
    descendants: dict[psutil.Process, Descendant] = field(default_factory=dict)
    loss: LostProcess | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def has_failed(self) -> bool:
        code = self.exit_code
        return code is not None and not (code == 0 and self.spec.ends_by_itself)

    def is_broken(self, now: float) -> bool:
        """Alive, but without a process it had and did not replace (a pool may end and replace a worker)."""
        if self.loss is None or self.exit_code is not None or now - self.loss.noticed_at < LOST_PROCESS_GRACE_SECONDS:
            return False
        if len(self.descendants) >= self.loss.size_before:
            self.loss = None
        return self.loss is not None

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """The end of its log."""
        return last_lines(self.log_path, count)
