"""A supervisor of runs, seen from the environment: started when it is first asked, asked from a thread, closed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from environments.tasks.sandbox.launch import Launch

START_AND_END_SECONDS = 45.0
_ROOT = str(Path(__file__).parents[3])
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from environments.tasks.sandbox_child import main; main()"


class SupervisorDied(Exception):
    """The supervisor ended without an answer; it has been closed."""


class SupervisorProcess:
    """One process, which runs one piece of code at a time. It ends with its parent, whatever ends that."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, launch: Launch) -> dict[str, Any]:
        """The result of a run, waited for."""
        try:
            channel = self._started()
            channel.settimeout(launch.wall_seconds + START_AND_END_SECONDS)
            channel.sendall(json.dumps(dataclasses.asdict(launch)).encode() + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n"):
                received = channel.recv(1 << 16)
                if not received:
                    raise ConnectionError("it ended")
                answer += received
            reply: dict[str, Any] = json.loads(answer)
        except OSError as error:
            self.close()
            raise SupervisorDied(str(error)) from error
        return reply

    def hang_up(self) -> None:
        """Have it end its run and itself; from any thread, and without waiting."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and wait until it is gone."""
        self.hang_up()
        if self._process is not None:
            try:
                self._process.wait(START_AND_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._socket is not None:
            self._socket.close()

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = (sys.executable, "-I", "-S", "-c", _PROGRAM)
                environment = {"LANG": "C.UTF-8"}
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
                )
        return self._socket
