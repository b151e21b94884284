"""Programs started as child processes: those of a launch (`ChildSpec`, `Child`), and a server of the trainer's own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from atropos_api.common.control_groups import usable_cores
from example_trainer.errors import TrainerError
from example_trainer.processes import die_with_parent
from example_trainer.processes.cleanup import SharedMemoryLedger
from example_trainer.processes.ports import HandoverChannel
from example_trainer.processes.program_log import (
    LARGEST_LOG_BYTES,
    SHOWN_LINES,
    last_lines,
    limit_size,
    open_private_log,
)
from example_trainer.processes.tree import end_processes, is_alive, open_process

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
MANY_CORES = 8


def thread_limit() -> dict[str, str]:
    """Return the variable that limits the OpenMP threads of a program on a machine with few cores; else nothing.

    There the threads of several programs spin against each other.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if usable_cores() <= MANY_CORES else {}


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], log_path: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output in a log; it is killed when the calling thread ends."""
    guarded = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]
    limit_size(log_path, LARGEST_LOG_BYTES)  # a server that is restarted often appends to one log
    with open_private_log(log_path) as log:
        return subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=pass_fds,
        )


# A child that exits because it lost one of its processes explains the loss better than the launcher could.
LOST_PROCESS_GRACE_SECONDS = 3.0


class ChildFailed(TrainerError):
    """A program of the run exited that should be running; the message holds its last log lines."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """The description of one program: its command, its environment, and what counts as a failure."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    ends_by_itself: bool = False
    """True if exit code 0 is a success and not a loss (trainer, environments)."""
    watch_descendants: bool = True
    """True if the program has failed when one of its long-lived processes vanishes."""
    may_restart: bool = False
    """True if the program goes on where it was when it is started again."""
    restart_flags: tuple[str, ...] = ()
    """Added to the command when the program is started again: what it did at its first start must not be repeated."""
    why_final: str = ""
    """The reason why a restart cannot help after its end, if that is not obvious."""
    largest_log_bytes: int = LARGEST_LOG_BYTES
    secret_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Secret settings, kept out of records and command lines: the program reads them from a temporary file."""


@dataclass(kw_only=True, slots=True)
class Descendant:
    """A process that a child started."""

    seen_at: float
    title: str = ""
    is_short_task: bool = True
    """True for another program, such as a compiler, which may run long and then exit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostProcess:
    """A long-lived process of a child that vanished while the child kept running, or the node that the child was on."""

    title: str
    """The words that follow "it lost"."""
    noticed_at: float
    size_before: int = 0


@dataclass(kw_only=True, slots=True)
class SupervisedProgram(ABC):
    """A program that a supervisor has started, on this machine or another."""

    spec: ChildSpec
    log_path: Path
    started_at: float
    restarted: int = 0
    """The number of restarts that led to this process."""
    descendants: dict[psutil.Process, Descendant] = field(default_factory=dict)
    """The processes that it has started, as far as they run on this machine."""
    loss: LostProcess | None = None

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Return its exit code, or None while it runs."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def has_failed(self) -> bool:
        code = self.exit_code
        return code is not None and not (code == 0 and self.spec.ends_by_itself)

    def is_broken(self, now: float) -> bool:  # noqa: ARG002 - a program here has some time to replace what it lost
        """Return True if it runs without something that it needs."""
        return self.loss is not None and self.exit_code is None

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """Return the last lines of its log."""
        return last_lines(self.log_path, count)


@dataclass(kw_only=True, slots=True)
class Child(SupervisedProgram):
    """A program that runs as a child of this process."""

    process: subprocess.Popen[bytes]
    handle: psutil.Process
    mark: str
    """The mark that its processes have in their environment, and those of no other child."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def is_broken(self, now: float) -> bool:
        """Return True if it runs without a process that it had and did not replace (a pool may replace its workers)."""
        if self.loss is None or self.exit_code is not None or now - self.loss.noticed_at < LOST_PROCESS_GRACE_SECONDS:
            return False
        if len(self.descendants) >= self.loss.size_before:
            self.loss = None
        return self.loss is not None


class ServerProcess:
    """One server process and all processes that it starts: the members of the session that it leads."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ledger: SharedMemoryLedger,
        channel: HandoverChannel,
        loaded: socket.socket,
        standby: socket.socket | None = None,
    ) -> None:
        """`standby` is the socket by which a server that waits is told what to serve."""
        self._process = process
        self._ledger = ledger
        self._loaded = loaded
        self._standby = standby
        self.channel = channel

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """Return the running processes of the server."""
        has_ended = self.exit_code is not None
        found = _session_members(self.pid)
        if has_ended and any(process.pid == self.pid for process in found):
            return []  # all have ended, and another process has the first one's number by now
        return found

    def note_shared_memory(self) -> None:
        """Record the shared memory that the server maps now, so that leftovers can be removed after it exits."""
        self._ledger.observe(self.members())

    def is_loaded(self) -> bool:
        """Return True once the server has loaded its model and waits at most for the server before it to stop."""
        readable, _, _ = select.select([self._loaded], [], [], 0)
        return bool(readable and self._loaded.recv(1, socket.MSG_PEEK))

    def serve(self, settings: Mapping[str, Any]) -> None:
        """Have a standby load and serve: `settings` are those that have changed since it was started."""
        assert self._standby is not None
        with contextlib.suppress(OSError), self._standby:  # if it has exited, the wait until it is loaded finds that
            self._standby.send(json.dumps(settings, default=str).encode())

    def discard(self) -> None:
        """End a standby that is not needed."""
        assert self._standby is not None
        self._standby.close()
        self.stop(grace_seconds=0)

    def stop(self, *, grace_seconds: float) -> None:
        """Stop the server and close its connections."""
        self.channel.close()
        self._end(grace_seconds)

    def hand_over(self, *, grace_seconds: float) -> None:
        """Stop the server; its connections go to the server that is started after it."""
        self._end(grace_seconds)

    def _end(self, grace_seconds: float) -> None:
        self.note_shared_memory()
        self._loaded.close()

        def living() -> list[psutil.Process]:
            self._process.poll()  # reaps the process, so that it does not stay a zombie
            return self.members()

        end_processes(living, grace_seconds=grace_seconds)
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # On a fully loaded machine a killed process takes long to free its memory.
            logger.warning("vLLM (pid %d) was killed but has not exited yet", self.pid)
        self._ledger.sweep()


def _session_members(session: int) -> list[psutil.Process]:
    """Return the running processes of a child's session; the session id is not reused while one of them runs."""
    found = (open_process(pid) for pid in psutil.pids() if _session_of(pid) == session)
    return [process for process in found if process is not None and is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
