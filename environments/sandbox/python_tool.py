"""The tool runs a model's Python in a sandbox, for environments that offer it to the model.

The code sees no network, no other process, no file of this machine except the interpreter's, and none of its
processes outlives the run; `docs/explanation/sandbox.md` says what that protects against and what it does not. Where
code cannot be isolated, the tool refuses to start, unless `require_isolation` is False. `SupervisorProcess` is the
client of one supervisor, started when first used; requests to it block, so `PythonTool` sends them from threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import geteuid
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from environments.sandbox.launch import Isolation, Launch, View, view_of_this_python
from environments.sdk.errors import EnvironmentsError

START_AND_END_SECONDS = 45.0
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from environments.sandbox.supervisor import main; main()"


class SupervisorExited(Exception):
    """The supervisor exited without an answer; it has been closed."""


class SupervisorProcess:
    """A supervisor process, which runs one piece of code at a time. It exits when its parent exits for any reason."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._disconnected = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, launch: Launch) -> dict[str, Any]:
        """Run the code and return the result; blocks."""
        try:
            channel = self._started()
            channel.settimeout(launch.wall_seconds + START_AND_END_SECONDS)
            channel.sendall(json.dumps(dataclasses.asdict(launch)).encode() + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n"):
                received = channel.recv(1 << 16)
                if not received:
                    raise ConnectionError("connection closed")
                answer += received
            reply: dict[str, Any] = json.loads(answer)
        except OSError as error:
            self.close()
            raise SupervisorExited(str(error)) from error
        return reply

    def disconnect(self) -> None:
        """Make the supervisor end its run and exit, or not start; callable from any thread, does not wait."""
        self._disconnected = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the supervisor and wait until it has exited."""
        self.disconnect()
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
            self._socket, child_end = socket.socketpair()
            with child_end:
                # Only once the socket is stored: `disconnect` in another thread either finds it or is noticed here.
                if self._disconnected:
                    raise ConnectionError("disconnected before its start")
                command = (sys.executable, "-I", "-S", "-c", _PROGRAM)
                environment = {"LANG": "C.UTF-8"}
                self._process = subprocess.Popen(
                    command,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        return self._socket


logger = logging.getLogger(__name__)

MECHANISMS = ("bubblewrap", "namespaces")
LIMITS_ALONE = Isolation(name="limits")
CHECK_PASSED = "all right"

# Run in the sandbox before any other code: it tries operations that must be refused.
CHECK = """
import os, socket
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
found = sorted(set(os.listdir("/")) - {top})
if found:
    print("it shows", *found)
elif os.getuid() == 0:
    print("it runs as root")
elif not refused(socket.socket):
    print("it opens sockets")
elif not refused(lambda: open("/here", "w")):
    print("it writes outside of its folder")
else:
    open("here", "w").close()
    print({check_passed!r})
"""


class SandboxUnavailable(EnvironmentsError):
    """A model's code cannot be isolated here as required, or cannot be run at all."""


class SandboxFailed(SandboxUnavailable):
    """A piece of code could not be run, as where this machine has no process or file descriptor left for it."""

    ends_server = False


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The output of the code, including errors, and its exit; `ended_by` is the limit that it reached, if any."""

    output: str
    exit_code: int
    ended_by: str = ""

    @property
    def timed_out(self) -> bool:
        return self.ended_by == "time"

    def as_text(self) -> str:
        """Return the text that the model is given."""
        return self.output.rstrip() or "(no output)"


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class PythonTool:
    """Runs code, at most `at_once` pieces at a time. The limits apply to all processes of one run together."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    output_characters: int = 4000
    at_once: int = 8
    require_isolation: bool = True
    mechanisms: tuple[str, ...] = MECHANISMS
    use_cgroups: bool = True
    way: Isolation = field(default=LIMITS_ALONE, init=False)
    _view: View = field(default_factory=view_of_this_python, init=False)
    _free: anyio.CapacityLimiter | None = field(default=None, init=False)
    _threads: anyio.CapacityLimiter | None = field(default=None, init=False)
    _idle: list[SupervisorProcess] = field(default_factory=list, init=False)
    _supervisors: set[SupervisorProcess] = field(default_factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self._supervisors)

    @property
    def isolated(self) -> bool:
        return self.way.isolates

    def probe(self) -> None:
        """Choose the best isolation that works; raises `SandboxUnavailable` where none does but one is required."""
        if sys.platform != "linux":
            raise SandboxUnavailable("a model's code runs on Linux only, in a virtual machine or a container elsewhere")
        reasons: dict[str, str] = {}
        for way in self._ways():
            reason = self._try(way)
            if reason is None:
                self.way = way
                logger.info("a model's code is isolated by %s", way)
                return
            reasons.setdefault(way.name, reason)
        self.way = LIMITS_ALONE
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        if self.require_isolation:
            raise SandboxUnavailable(
                f"a model's code cannot be isolated here ({found}); allow user namespaces, or give this environment a "
                "virtual machine of its own and set --env.require_isolation false"
            )
        logger.warning(
            "a model's code runs with this user's files, network and tokens, and can end this user's programs; only "
            "time, memory, processes and the size of each file are limited (%s)",
            found,
        )

    async def run(self, code: str) -> ToolResult:
        """Run `code`. Returns soon after `wall_seconds` at the latest, whatever the code does."""
        if self._free is None:
            self._free, self._threads = anyio.CapacityLimiter(self.at_once), anyio.CapacityLimiter(self.at_once)
        async with self._free:
            with self._folder() as folder:
                return await self._ask(self._launch(code, self.way, folder))

    def close(self) -> None:
        """End all supervisors and the code they run."""
        self._closed = True
        _close_all(self._supervisors)
        self._idle.clear()

    def _ways(self) -> Iterator[Isolation]:
        """Yield the possible kinds of isolation, the best first."""
        for name in self.mechanisms:
            # Code started by root can run as its own user, for which the kernel enforces limits that root is exempt
            # from.
            for privileged in (True, False) if geteuid() == 0 else (False,):
                for proc in (True, False):
                    yield Isolation(name=name, privileged=privileged, proc=proc)

    def _try(self, way: Isolation) -> str | None:
        """Return the reason why this isolation does not work; None if it works."""
        check = CHECK.format(top=self._view.top, check_passed=CHECK_PASSED)
        supervisor = self._supervisor()
        try:
            reply = supervisor.ask(self._launch(check, way, ""))
        except SupervisorExited as error:
            return f"the supervisor exited: {error}"
        self._idle.append(supervisor)
        if "failed" in reply:
            return " ".join(reply["failed"].splitlines()[-1:])
        output = reply["output"].strip()
        return (
            None if output == CHECK_PASSED else output.splitlines()[-1] if output else f"the check ended with {reply}"
        )

    async def _ask(self, launch: Launch) -> ToolResult:
        """Ask a supervisor; one that exits is replaced once, since it may have been killed from outside."""
        reason = ""
        for _ in range(2):
            if self._closed:
                raise SandboxUnavailable("the Python tool is closed and runs no code")
            supervisor = self._supervisor()
            try:
                reply = await anyio.to_thread.run_sync(
                    partial(supervisor.ask, launch), abandon_on_cancel=True, limiter=self._threads
                )
            except SupervisorExited as error:
                reason = f"its supervisor exited: {error}"
                self._supervisors.discard(supervisor)
                continue
            except BaseException:
                supervisor.disconnect()
                # Without this wait it would stay a zombie with an open socket, and its place be taken at once.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(supervisor.close, limiter=self._threads)
                self._supervisors.discard(supervisor)
                raise
            self._idle.append(supervisor)
            if "failed" not in reply:
                return self._result(reply)
            reason = reply["failed"]
        raise SandboxFailed(f"a model's code could not be run: {reason}")

    def _supervisor(self) -> SupervisorProcess:
        if self._idle:
            return self._idle.pop()
        supervisor = SupervisorProcess()
        self._supervisors.add(supervisor)
        return supervisor

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Make the working folder of code that is not isolated; isolated code has one in memory."""
        if self.isolated:
            yield ""
            return
        with tempfile.TemporaryDirectory(prefix="python-tool-", ignore_cleanup_errors=True) as folder:
            yield folder

    def _launch(self, code: str, way: Isolation, folder: str) -> Launch:
        return Launch(
            code=code.encode("utf-8", "replace").decode(),
            way=way,
            view=self._view,
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_bytes,
            file_bytes=self.file_bytes,
            output_bytes=self.output_characters * 4,
            folder=folder,
            use_cgroups=self.use_cgroups,
        )

    def _result(self, reply: dict[str, Any]) -> ToolResult:
        text = reply["output"]
        if len(text) > self.output_characters:
            text = f"{text[: self.output_characters]}\n(output cut off)"
        if reply["ended_by"]:
            text = f"{text.rstrip()}\n{self._limit_message(reply['ended_by'])}".lstrip()
        return ToolResult(text, reply["exit_code"], reply["ended_by"])

    def _limit_message(self, ended_by: str) -> str:
        return {
            "time": "TimeoutError: the code was ended after its time",
            "memory": f"MemoryError: the code was ended, it held more than {self.memory_bytes >> 20} MiB",
            "processes": "BlockingIOError: the code was ended, it had too many processes",
            "files": "OSError: the code was ended, it had too many files",
        }[ended_by]


def _close_all(supervisors: set[SupervisorProcess]) -> None:
    for supervisor in supervisors:
        supervisor.disconnect()
    while supervisors:
        supervisors.pop().close()
