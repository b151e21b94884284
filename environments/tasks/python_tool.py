"""A tool that runs a model's Python in a child process with limits, seen from the environment that offers it.

Where Linux lets ordinary users make namespaces, the code has no network, a read-only file system but for an empty
folder in memory, and ends with all it started. It can still read what this user can read. Where namespaces are
forbidden (many containers), only the limits on time, memory and file sizes hold; a warning says so when it is set up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from environments.sdk.errors import EnvironmentsError

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-I", str(Path(__file__).with_name("sandbox_child.py")))
PROBE_SECONDS = 20.0
ENDED_BY_CPU_LIMIT = frozenset({128 + signal.SIGXCPU, 128 + signal.SIGKILL, -signal.SIGXCPU, -signal.SIGKILL})


class SandboxUnavailable(EnvironmentsError):
    """A model's code cannot be run here as safely as was asked for."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the code printed, errors among it, and whether it ended well and in time."""

    output: str
    exit_code: int
    timed_out: bool = False

    def as_text(self) -> str:
        """What a model is told."""
        return self.output.rstrip() or "(no output)"


@dataclass(slots=True, kw_only=True)
class PythonTool:
    """Runs code, `at_once` at a time; each in a new process that nothing is left of."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    output_characters: int = 4000
    at_once: int = 8
    require_isolation: bool = False
    isolated: bool = field(default=False, init=False)
    _free: anyio.CapacityLimiter | None = field(default=None, init=False)

    def probe(self) -> None:
        """Find out how far code can be isolated here."""
        with tempfile.TemporaryDirectory(prefix="python-tool-") as folder:
            probe = subprocess.run(
                (*PROGRAM, "--probe"), capture_output=True, timeout=PROBE_SECONDS, check=False, cwd=folder
            )
        self.isolated = probe.returncode == 0
        if self.isolated:
            return
        reason = probe.stderr.decode(errors="replace").strip()
        if self.require_isolation:
            raise SandboxUnavailable(
                f"code cannot be isolated here ({reason}); allow user namespaces, or use a container or virtual "
                "machine of its own and set --env.require_isolation false"
            )
        logger.warning(
            "a model's code runs here with limits on time, memory and files but with this user's rights and network "
            "(%s); run this environment in a container or virtual machine of its own",
            reason,
        )

    async def run(self, code: str) -> ToolResult:
        """Run `code`; whatever it does, this returns soon after `wall_seconds` at the latest."""
        if self._free is None:
            self._free = anyio.CapacityLimiter(self.at_once)
        async with self._free:
            with tempfile.TemporaryDirectory(prefix="python-tool-") as folder:
                return await self._run_in(folder, code)

    async def _run_in(self, folder: str, code: str) -> ToolResult:
        process = await anyio.open_process(
            PROGRAM,
            cwd=folder,
            env={
                "PATH": os.environ.get("PATH", ""),
                "LANG": "C.UTF-8",
                "HOME": folder,
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output = bytearray()
        timed_out = True
        try:
            with anyio.move_on_after(self.wall_seconds):
                await self._hand_over(process, code)
                assert process.stdout is not None
                await _read(process.stdout, output, most=self.output_characters * 4)
                await process.wait()
                timed_out = False
        finally:
            await _end(process)
        return self._result(bytes(output), process.returncode or 0, timed_out=timed_out)

    async def _hand_over(self, process: Process, code: str) -> None:
        request = {
            "code": code.encode("utf-8", "replace").decode(),
            "isolate": self.isolated,
            "cpu_seconds": self.cpu_seconds,
            "memory_bytes": self.memory_bytes,
            "file_bytes": self.file_bytes,
        }
        assert process.stdin is not None
        await process.stdin.send(json.dumps(request).encode())
        await process.stdin.aclose()

    def _result(self, output: bytes, exit_code: int, *, timed_out: bool) -> ToolResult:
        timed_out = timed_out or exit_code in ENDED_BY_CPU_LIMIT
        text = output.decode("utf-8", "replace")
        if len(text) > self.output_characters:
            text = f"{text[: self.output_characters]}\n(output cut off)"
        if timed_out:
            text = f"{text.rstrip()}\nTimeoutError: the code was ended after its time".lstrip()
        return ToolResult(text, exit_code, timed_out)


async def _read(stream: ByteReceiveStream, into: bytearray, *, most: int) -> None:
    """Keep the stream's first bytes; the rest is read and dropped, so that the writer is not held up."""
    async for piece in stream:
        into += piece[: max(0, most - len(into))]


async def _end(process: Process) -> None:
    """Kill the process and its group; processes in namespaces of their own end with it."""
    with anyio.CancelScope(shield=True):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()
