"""The processes under test, started on a free port and ended by their id; CPU time and memory are read from outside."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
ROOMY = ("--max-queued-sequences", "1000000", "--log-level", "warning")


@dataclass(frozen=True)
class Server:
    """A running server process."""

    name: str
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads so far, to the nanosecond, from the process's own clock."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@contextmanager
def reference(python: Path, directory: Path) -> Iterator[Server]:
    command = [
        str(python),
        "-m",
        "uvicorn",
        "atroposlib.api:app",
        "--log-level",
        "warning",
        "--no-access-log",
        "--timeout-keep-alive",
        "600",
    ]
    with _running("Atropos 0.4.0", command, directory, probe="/") as server:
        yield server


@contextmanager
def ours(store: str, directory: Path, options: Sequence[str] = ROOMY) -> Iterator[Server]:
    """Start our broker; everything not named is at its default."""
    command = [sys.executable, "-m", "atropos_api", "--store", store, *options]
    with _running("this broker", command, directory, probe="/readyz") as server:
        yield server


@contextmanager
def echo(directory: Path) -> Iterator[Server]:
    """Start nothing but uvicorn, to measure the cost of receiving and sending the bytes."""
    options = ["--log-level", "warning", "--no-access-log", "--timeout-keep-alive", "600", "--lifespan", "off"]
    command = [sys.executable, "-m", "uvicorn", "benchmarks.broker.echo:app", *options]
    with _running("raw uvicorn echo", command, directory, probe="/") as server:
        yield server


@contextmanager
def _running(name: str, command: list[str], directory: Path, *, probe: str) -> Iterator[Server]:
    port = _free_port()
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    if command[0] == sys.executable:
        environ["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen([*command, "--port", str(port)], cwd=directory, env=environ)
    try:
        _wait_until_up(process, port, probe)
        yield Server(name, port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], port: int, probe: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", probe)
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise RuntimeError(f"{process.args!r} did not come up on port {port}; run it by hand to see why")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
