"""One child process that compares mathematics, seen from its parent: started, asked, replaced when it hangs or dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environments.rewards.errors import MathVerifyUnavailable

START_LIMIT_SECONDS = 120.0
MATH_CHILD = (sys.executable, "-P", str(Path(__file__).with_name("math_child.py")))


class ChildHung(Exception):
    """The child used up its time; it has been killed. `during` names what it was reading."""


class ChildDied(Exception):
    """The child ended by itself, without an answer."""


class Child:
    """A running child. It ends with its parent: its standard input closes then, and each question has a time limit."""

    def __init__(self, command: Sequence[str] = MATH_CHILD) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = b""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with theirs:
            try:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, env=environment
                )
            except OSError as error:
                self._socket.close()
                raise MathVerifyUnavailable(f"the process that compares answers does not start: {error}") from error
        self._require_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def ask(self, gold: str, answer: str, *, cpu_seconds: float, wall_seconds: float) -> str:
        """The child's verdict; `gold` means that the gold could not be read in time or at all."""
        deadline = time.monotonic() + wall_seconds
        question = {"gold": gold, "answer": answer, "cpu_seconds": cpu_seconds}
        gold_was_read = False
        try:
            with self._closed_on_failure():
                self._socket.settimeout(wall_seconds)
                self._socket.sendall(json.dumps(question).encode() + b"\n")
                gold_was_read = self._read(deadline)["gold"]
                return str(self._read(deadline)["verdict"])
        except ChildHung:
            if not gold_was_read:
                return "gold"
            raise

    def close(self) -> None:
        """Kill the child and wait for it, so that nothing of it is left."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _require_ready(self) -> None:
        try:
            with self._closed_on_failure():
                hello = self._read(time.monotonic() + START_LIMIT_SECONDS)
        except (ChildHung, ChildDied) as error:
            raise MathVerifyUnavailable(f"the process that compares answers does not start: {error}") from error
        if not hello["ready"]:
            self.close()
            raise MathVerifyUnavailable(
                f"answers cannot be compared: {hello['reason']}; pip install 'atropos-grpo[environments]'"
            )

    def _read(self, deadline: float) -> Any:
        """The next line, decoded."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            received = self._socket.recv(65536)
            if not received:
                raise ChildDied
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _exit_code(self) -> int | None:
        """How the child ended; None for one that hung up and lives."""
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """A child that did not answer is of no more use; how it ended says whether it ran out of time."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise ChildHung("no answer within its time") from None
        except (ChildDied, OSError) as error:
            code = self._exit_code()
            self.close()
            if code == -getattr(signal, "SIGPROF", 0):
                raise ChildHung("its CPU time is used up") from None
            raise ChildDied(f"it ended with code {code}") from error
