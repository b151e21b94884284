"""The code inside a seat: a supervisor of one program on the seat's node.

It runs in a process of its own, so the program and all that it has started end with that process: the kernel kills the
program with the thread that started it, and the supervisor's guardian ends the rest.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from example_trainer.launcher.placement.roles import ProgramState
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import ChildSpec, thread_limit
from example_trainer.processes.ports import free_port

FOREIGN_PREFIXES = ("SLURM_", "PMI_", "PMIX_")
"""Variables by which MPI, and libraries that look for it, would take a program for a task of the surrounding job."""
SET_BY_RAY = frozenset({"OMP_NUM_THREADS"})
"""Variables that Ray sets to the seat's number of CPUs; a run on one machine does not have them either."""


class SeatHost:
    """Runs one program at a time. Its methods are called one after the other, on the process's main thread."""

    def __init__(self, log_dir: Path, *, hides_gpus: bool, directory: Path) -> None:
        """`hides_gpus` is true for a seat without a GPU: its programs then see none of the node's.

        `directory` is the launcher's, from which relative paths in settings count; a node that lacks it has them count
        from where its Ray was started.
        """
        with contextlib.suppress(OSError):
            os.chdir(directory)
        for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES) or name in SET_BY_RAY]:
            del os.environ[name]
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {}
        self._log_dir = log_dir
        self._held = contextlib.ExitStack()
        self._supervisor: Supervisor | None = None
        self._name = ""

    def sees(self, path: Path) -> bool:
        """Return True if this node has the path, as it does where the run directory is on a shared file system."""
        return path.exists()

    def free_port(self, address: str) -> int:
        return free_port(address, held=self._held)

    def start(self, spec: ChildSpec) -> None:
        if self._supervisor is None:
            # Orphans are not adopted: Ray kills all children of a process that ends, the guardian among them.
            self._supervisor = Supervisor(self._log_dir, detached=True)
        self._name = spec.name
        self._supervisor.start(replace(spec, environment={**thread_limit(), **self._hidden, **spec.environment}))

    def state(self) -> ProgramState:
        if self._supervisor is None or self._name not in self._supervisor:
            return ProgramState()
        child = self._supervisor[self._name]
        failed = child in self._supervisor.failed()
        return ProgramState(exit_code=child.exit_code, loss=child.loss.title if failed and child.loss else None)

    def stop(self, grace_seconds: float) -> None:
        self._held.close()
        if self._supervisor is not None and self._name in self._supervisor:
            self._supervisor.stop(self._name, grace_seconds=grace_seconds)

    def close(self) -> None:
        """Remove what the programs have left; none of them runs any more."""
        self._held.close()
        if self._supervisor is not None:
            self._supervisor.close(grace_seconds=0)
            self._supervisor = None
