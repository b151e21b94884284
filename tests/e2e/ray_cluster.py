"""A cluster of Ray nodes on this machine, and the programs of a run that are on them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from example_trainer.processes.tree import is_alive

from .conftest import Launched

NODES = Path(__file__).with_name("ray_nodes.py")
GONE_SECONDS = 10.0
REPLACED_SECONDS = 90.0


class RayNodes:
    """The cluster's program, and the process ids that it reports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_memory_monitor_refresh_ms": "0"},
        )
        told = self._read()
        self.address: str = told["address"]
        self.gcs = psutil.Process(told["gcs"])
        self.raylets = [psutil.Process(pid) for pid in told["raylets"]]

    def ask(self, words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._read()

    def free_gpus(self) -> float:
        return float(self.ask("free").get("GPU", 0.0))

    def replace(self, raylet: psutil.Process) -> None:
        """Start a node in the place of one that was killed."""
        self.raylets.remove(raylet)
        self.add()

    def add(self) -> None:
        """Have one more node join the cluster."""
        self.raylets.append(psutil.Process(self.ask("add")["raylet"]))

    def raylet_of(self, process: psutil.Process) -> psutil.Process:
        """Return the raylet of the node that a program runs on."""
        return next(parent for parent in process.parents() if parent in self.raylets)

    def close(self) -> None:
        tree = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for process in [psutil.Process(self._process.pid), *tree] if self._process.poll() is None else tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("the cluster's program has ended")


def programs(launched: Launched) -> dict[str, psutil.Process]:
    """Return the run's programs by the name of their settings file, on every node; `plot` has none."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        for word in process.info["cmdline"] or ():
            if word.startswith(f"{launched.run_dir}/configs/") and is_alive(process):
                found[Path(word).stem] = process
    return found


def remains(launched: Launched) -> list[str]:
    """Return what is left of a run on any node: processes with its directory, and the guardians of its seats."""
    left = [repr(process) for process in programs(launched).values()]
    return left + [repr(process) for process in marked(launched)]


def marked(launched: Launched) -> list[psutil.Process]:
    """Return the processes whose environment has the run's directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(launched.run_dir) in value for value in process.environ().values()) and is_alive(process):
                found.append(process)
    return found


def steps_of(launched: Launched) -> list[int]:
    return [json.loads(line)["step"] for line in launched.metrics.read_text().splitlines()]
