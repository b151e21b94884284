"""What a run of code is given, and how its first process comes to be, whichever way it is kept in."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from environments.tasks.sandbox.view import WORK_FOLDER, View

READY, FILTER = 3, 4
"""Descriptors of the code's process: a socket by which it asks to begin, and bubblewrap's filter of system calls."""

START_FAILED = 97
NOBODY = 65534
MOST_OPEN_FILES, MOST_PROCESSES = 64, 32
RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How code is kept in: by bubblewrap, by namespaces of our own making, or (`limits`) not at all.

    `privileged`: by root's rights, which it gives up before the code begins; else in a user namespace. `proc`: with a
    `/proc` of its own, which some containers forbid.
    """

    name: str
    privileged: bool = False
    proc: bool = True

    @property
    def isolates(self) -> bool:
        return self.name != "limits"

    def __str__(self) -> str:
        rights = "as root" if self.privileged else "in a user namespace"
        without = "" if self.proc else ", without /proc"
        return f"{self.name} {rights}{without}" if self.isolates else "limits alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run of code, with its limits."""

    code: str
    way: Way
    view: View
    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    file_bytes: int
    output_bytes: int
    folder: str = ""
    """The working folder of code that is not isolated."""

    use_cgroups: bool = True

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Launch:
        return cls(**given | {"way": Way(**given["way"]), "view": View(**given["view"])})

    @property
    def work_folder(self) -> str:
        return WORK_FOLDER if self.way.isolates else self.folder

    def environment(self) -> dict[str, str]:
        """Nothing of this process's own environment, which may hold tokens."""
        programs = [str(Path(self.view.python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        folder = self.work_folder
        return {
            "PATH": os.pathsep.join(programs),
            "LANG": "C.UTF-8",
            "HOME": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def runner_command(self, user: int = -1) -> list[str]:
        """Python with the program that becomes the code; `user` is whom it becomes first, -1 nobody else."""
        # Counted for one user of one user namespace; as nobody of this machine it would count other programs too.
        processes = MOST_PROCESSES if self.way.isolates and user != NOBODY else -1
        numbers = (user, READY, self.cpu_seconds, self.memory_bytes, self.file_bytes, MOST_OPEN_FILES, processes, 0)
        return [self.view.python, "-I", "-S", "-B", "-c", RUNNER, *map(str, numbers), *self.view.packages]


def user_of_its_own() -> int:
    """A user id for code that root starts: this process's own where there are enough of them, else nobody's.

    The kernel counts processes by user, so that runs with one user between them would take each other's.
    """
    first, count = 0x70000000, 0x400000
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        inside, _, length = map(int, line.split())
        if inside <= first and first + count <= inside + length:
            return first + os.getpid() % count
    return NOBODY


def sealed_file(content: bytes) -> int:
    """A file in memory that nobody can change, read from its beginning."""
    file = os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    written = 0
    while written < len(content):
        written += os.write(file, content[written:])
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def start(become: Callable[[], NoReturn], files: dict[int, int]) -> int:
    """Fork a child that holds nothing but `files` (its descriptor: ours) and is then what `become` makes of it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        # First out of the way of the numbers that are wanted, then to them.
        apart = {wanted: fcntl.fcntl(file, fcntl.F_DUPFD, 64) for wanted, file in files.items()}
        for wanted, file in apart.items():
            os.dup2(file, wanted)
        os.closerange(max(files) + 1, os.sysconf("SC_OPEN_MAX"))
        become()
    except BaseException as error:  # noqa: BLE001 - a child must never go on as its parent
        os.write(2, f"{error.strerror if isinstance(error, OSError) else error!r}\n".encode())
    finally:
        os._exit(START_FAILED)


def exec_program(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - the purpose of this program
