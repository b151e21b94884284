"""Fixtures of the whole-process tests: a launcher over stand-ins, run as a program, and the list of its remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from example_trainer.processes.tree import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
STANDIN_LAUNCHER = Path(__file__).with_name("launch_standins.py")


@dataclass(kw_only=True)
class Launched:
    """A running launcher and everything it has started."""

    process: subprocess.Popen[str]
    run_dir: Path
    scratch: Path
    started_at: float
    ended_at: float = 0.0

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """Return the direct child with all `words` in its command line, paths without their directories.

        A child begins as `.../example_trainer/processes/die_with_parent.py`, which is no trainer.
        """
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it may have ended since
                parts = [Path(part).name for part in process.cmdline()]
                if all(any(word in part for part in parts) for word in words):
                    return process
        raise LookupError(words)

    def wait_for_steps(self, count: int, limit_seconds: float = 60) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, "".join(self.process.communicate())
            return self.metrics.exists() and self.metrics.read_text().count("\n") >= count

        assert wait_until(reached, limit_seconds), self.logs()

    def steps(self) -> int:
        return self.metrics.read_text().count("\n")

    def end(self, limit_seconds: float = 60) -> tuple[int, str, str]:
        """Wait for the end; return exit code, stdout and stderr, and set `ended_at`."""
        out, error = self.process.communicate(timeout=limit_seconds)
        self.ended_at = time.monotonic()
        return self.process.returncode, out, error

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.run_dir.glob("logs/latest/*.log"))


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start launchers, each with a temporary directory of its own; the processes left at the end are killed."""
    begun: list[Launched] = []
    # A short path, because sockets are in this directory.
    scratch = Path(tempfile.mkdtemp(prefix="e2e-"))

    def start(*command: str, run_dir: Path | None = None, cwd: Path = ROOT, **variables: str) -> Launched:
        directory = run_dir or tmp_path / "run"
        process = subprocess.Popen(
            [*command, "--run-dir", str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(scratch), **variables},
        )
        begun.append(Launched(process=process, run_dir=directory, scratch=scratch, started_at=time.monotonic()))
        return begun[-1]

    yield start
    for launched in begun:
        if launched.process.poll() is None:
            launched.process.send_signal(signal.SIGTERM)
            launched.process.communicate(timeout=30)
    # The guardian of a launcher that was killed may be removing the same directories.
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def standins(start_launcher: Callable[..., Launched], tmp_path: Path) -> Callable[..., Launched]:
    """The launcher over stand-ins for its programs, with a model directory that passes the first check."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def start(*flags: str, **variables: str) -> Launched:
        command = (sys.executable, str(STANDIN_LAUNCHER), "--model-name", str(model), *flags)
        return start_launcher(*command, **variables)

    return start


@pytest.fixture
def traces() -> Callable[..., list[str]]:
    """Return a function that lists the remains of a run: processes of `tree`, shared memory, temporary directories."""
    memory_before = memory_names()

    def left(launched: Launched, tree: list[psutil.Process]) -> list[str]:
        wait_until(lambda: not any(map(is_alive, tree)), 5)
        processes = [repr(process) for process in tree if is_alive(process)]
        memory = [name for name in memory_names() - memory_before if _is_ours(name, tree)]
        folders = sorted(path.name for path in launched.scratch.glob("atropos-*"))
        return [*processes, *memory, *folders]

    return left


def memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _is_ours(name: str, tree: list[psutil.Process]) -> bool:
    """Return True for the remains of these processes: the stand-ins' names end with their process id."""
    return name.startswith("atropos-standin-") and int(name.rpartition("-")[2]) in {process.pid for process in tree}
