r"""Compares mathematical answers by math-verify, in child processes with a time limit.

    verifier = MathVerifier()
    (judgement,) = await verifier.judge_all([(r"\frac{1}{2}", "0.5")])

`MathWorker` is one child process, seen from its parent. A child is started when it is first needed, used for all
later answers, and killed and replaced when an expression makes it hang. The event loop never blocks: each child has a
thread that waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from atropos_api.common.control_groups import usable_cores
from environments.rewards.protocol import MathVerifyUnavailable

START_LIMIT_SECONDS = 120.0
MATH_CHILD = (sys.executable, "-P", str(Path(__file__).with_name("math_worker.py")))


class ChildTimedOut(Exception):
    """The child used up its time and has been killed."""


class ChildExited(Exception):
    """The child exited without an answer."""


class MathWorker:
    """A running child. It exits with its parent, which closes its standard input; each question has a time limit."""

    def __init__(self, command: Sequence[str] = MATH_CHILD) -> None:
        self._socket, child_end = socket.socketpair()
        self._received = b""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with child_end:
            try:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    stdin=child_end.fileno(),
                    stdout=child_end.fileno(),
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError as error:
                self._socket.close()
                raise MathVerifyUnavailable(f"the process that compares answers cannot be started: {error}") from error
        self._require_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def ask(self, gold: str, answer: str, *, cpu_seconds: float, wall_seconds: float) -> str:
        """Return the child's verdict; `gold` means that the gold could not be read, or not in time."""
        deadline = time.monotonic() + wall_seconds
        question = {"gold": gold, "answer": answer, "cpu_seconds": cpu_seconds}
        gold_was_read = False
        try:
            with self._closed_on_failure():
                self._socket.settimeout(wall_seconds)
                self._socket.sendall(json.dumps(question).encode() + b"\n")
                gold_was_read = self._read(deadline)["gold"]
                return str(self._read(deadline)["verdict"])
        except ChildTimedOut:
            if not gold_was_read:
                return "gold"
            raise

    def close(self) -> None:
        """Kill the child and wait until it has exited."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _require_ready(self) -> None:
        try:
            with self._closed_on_failure():
                hello = self._read(time.monotonic() + START_LIMIT_SECONDS)
        except (ChildTimedOut, ChildExited) as error:
            raise MathVerifyUnavailable(f"the process that compares answers cannot be started: {error}") from error
        if not hello["ready"]:
            self.close()
            raise MathVerifyUnavailable(
                f"answers cannot be compared: {hello['reason']}; pip install 'atropos-grpo[environments]'"
            )

    def _read(self, deadline: float) -> Any:
        """Return the next line, decoded."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            received = self._socket.recv(65536)
            if not received:
                raise ChildExited
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _exit_code(self) -> int | None:
        """Return the child's exit code; None if it closed its socket and still runs."""
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close a child that did not answer; its exit code shows if its CPU time was used up."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise ChildTimedOut("no answer within the time limit") from None
        except (ChildExited, OSError) as error:
            code = self._exit_code()
            self.close()
            if code == -getattr(signal, "SIGPROF", 0):
                raise ChildTimedOut("the CPU time limit was reached") from None
            raise ChildExited(f"the process exited with code {code}") from error


WALL_PER_CPU_SECOND = 4.0
"""Wall seconds per CPU second before a child counts as hung: the limit is CPU time, and a busy machine slows it down.
"""


class Outcome(StrEnum):
    """The possible results of comparing an answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no answer"
    GOLD_UNPARSABLE = "gold"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of one comparison; `reason` says why it is undecided."""

    outcome: Outcome
    reason: str = ""

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.CORRECT


class AnswerJudge(Protocol):
    """An object that compares answers with their golds."""

    def judge(self, gold: str, answer: str) -> Judgement: ...

    async def judge_all(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]: ...


class MathVerifier:
    """A pool of children. `time_limit_seconds` is CPU time for one answer; `cache_size` 0 disables the cache."""

    def __init__(
        self,
        *,
        workers: int | None = None,
        time_limit_seconds: float = 5.0,
        cache_size: int = 0,
        child_command: Sequence[str] = MATH_CHILD,
    ) -> None:
        self.time_limit_seconds = time_limit_seconds
        self.replaced = 0
        self._command = child_command
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, str], Judgement] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._children: set[MathWorker] = set()
        count = workers or min(4, usable_cores())
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="math-verify")
        self._finalizer = weakref.finalize(self, _close_children, self._children)

    @property
    def child_pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._children]

    def judge(self, gold: str, answer: str) -> Judgement:
        """Compare one answer; blocks. From async code use `judge_all`."""
        return self._threads.submit(self._judge, gold, answer).result()

    async def judge_all(self, pairs: Iterable[tuple[str, str]]) -> list[Judgement]:
        """Compare many answers, in the order given; equal pairs are compared once."""
        wanted = list(pairs)
        distinct = dict.fromkeys(wanted)
        futures = [asyncio.wrap_future(self._threads.submit(self._judge, *pair)) for pair in distinct]
        judged = dict(zip(distinct, await asyncio.gather(*futures), strict=True))
        return [judged[pair] for pair in wanted]

    def close(self) -> None:
        """End the children; also done when the verifier is garbage-collected or the program exits."""
        self._threads.shutdown(cancel_futures=True)
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _judge(self, gold: str, answer: str) -> Judgement:
        known = self._cached(gold, answer)
        if known is not None:
            return known
        judgement = self._ask(gold, answer)
        if self._cache_size and judgement.outcome is not Outcome.UNDECIDED:
            self._cache_result(gold, answer, judgement)
        return judgement

    def _ask(self, gold: str, answer: str) -> Judgement:
        """Ask a child; if it exits, ask its replacement once, since the child may have been killed from outside."""
        reason = ""
        for _ in range(2):
            try:
                verdict = self._child().ask(
                    gold,
                    answer,
                    cpu_seconds=self.time_limit_seconds,
                    wall_seconds=self.time_limit_seconds * WALL_PER_CPU_SECOND,
                )
            except ChildTimedOut as error:
                return Judgement(Outcome.UNDECIDED, f"no verdict in {self.time_limit_seconds:g} s: {error}")
            except ChildExited as error:
                reason = str(error)
            else:
                return _judgement(verdict)
        return Judgement(Outcome.UNDECIDED, reason)

    def _child(self) -> MathWorker:
        """Return the calling thread's child; one that was closed is replaced."""
        child: MathWorker | None = getattr(self._local, "child", None)
        if child is None or child.closed:
            new = self._local.child = MathWorker(self._command)
            with self._lock:
                self._children.add(new)
                if child is not None:
                    self._children.discard(child)
                    self.replaced += 1
            return new
        return child

    def _cached(self, gold: str, answer: str) -> Judgement | None:
        with self._lock:
            if (gold, answer) not in self._cache:
                return None
            self._cache.move_to_end((gold, answer))
            return self._cache[gold, answer]

    def _cache_result(self, gold: str, answer: str, judgement: Judgement) -> None:
        with self._lock:
            self._cache[gold, answer] = judgement
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)


def _judgement(verdict: str) -> Judgement:
    try:
        return Judgement(Outcome(verdict))
    except ValueError:
        return Judgement(Outcome.UNDECIDED, verdict)


def _close_children(children: set[MathWorker]) -> None:
    for child in list(children):
        child.close()
    children.clear()
