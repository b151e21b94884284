"""One vLLM server as a child of the trainer: all that it starts, what it maps, and its end."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess

import psutil

from example_trainer.running.leftovers import SharedMemoryLedger
from example_trainer.running.process_tree import end_processes, is_alive, open_process
from example_trainer.serving.sockets import HandoverChannel

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class ServerProcess:
    """One server process with all that it starts: the members of the session that it leads."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ledger: SharedMemoryLedger,
        channel: HandoverChannel,
        loaded: socket.socket,
    ) -> None:
        self._process = process
        self._ledger = ledger
        self._loaded = loaded
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
        return _session_members(self.pid)

    def note_shared_memory(self) -> None:
        """Note the shared memory that the server maps now, to remove what it may leave behind."""
        self._ledger.observe(self.members())

    def is_loaded(self) -> bool:
        """True once it could serve, but for the server before it."""
        readable, _, _ = select.select([self._loaded], [], [], 0)
        return bool(readable and self._loaded.recv(1, socket.MSG_PEEK))

    def stop(self, *, grace_seconds: float) -> None:
        """End it, and the connections that it has."""
        self.channel.close()
        self._end(grace_seconds)

    def hand_over(self, *, grace_seconds: float) -> None:
        """End it; its connections go to the server that is started after it."""
        self._end(grace_seconds)

    def _end(self, grace_seconds: float) -> None:
        self.note_shared_memory()
        self._loaded.close()

        def living() -> list[psutil.Process]:
            self._process.poll()  # collects the exit, so that it does not linger as a zombie
            return self.members()

        end_processes(living, grace_seconds=grace_seconds)
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # On a machine without a moment to spare a killed process takes long to let go of its memory.
            logger.warning("vLLM (pid %d) was killed and is still on its way out", self.pid)
        self._ledger.sweep()


def _session_members(session: int) -> list[psutil.Process]:
    """Living processes of the session that a child leads; its number stays taken as long as one of them lives."""
    found = (open_process(pid) for pid in psutil.pids() if _session_of(pid) == session)
    return [process for process in found if process is not None and is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
