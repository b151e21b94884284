"""The parts of a run of code that all kinds of isolation share: its view of the file system, settings and start.

The view shows the interpreter, its packages, programs and libraries, read-only. Nothing else of the machine is
visible: no home, no `/run`, `/var` or `/sys`, no project, and of `/dev` only harmless devices. `Isolation` and
`Launch` are the settings of a run; `start` and `exec_program` make its first process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MEMORY_FOLDER = "/tmp"  # noqa: S108 - the sandbox's own
WORK_FOLDER = f"{MEMORY_FOLDER}/work"
"""The code's working folder, empty at first; /tmp itself is not empty if the interpreter is installed below it."""

DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")

# Read by the dynamic linker and by Debian's alternatives, which choose between programs.
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_ROOTS = ("/", "/usr", "/usr/local")

# Whole prefixes would show other files kept there: a project in its own environment, sources in /usr/src.
_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share", "pyvenv.cfg")
_STORES = ("/nix/store", "/gnu/store")


@dataclass(frozen=True, slots=True)
class View:
    """The visible files and folders: `folders` (and files) as pairs (source, inner path), `links` as (target, path)."""

    python: str
    packages: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]

    @property
    def top(self) -> set[str]:
        """The names in the root folder of the view."""
        paths = [path for _, path in (*self.folders, *self.links)]
        return {Path(path).parts[1] for path in (*paths, WORK_FOLDER, "/dev", "/proc")}


def view_of_this_python() -> View:
    """Return the view for code that this process's interpreter runs, with the packages that it finds here."""
    packages = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    roots = dict.fromkeys((*_ROOTS, sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))
    wanted = [*(f"{root.rstrip('/')}/{part}" for root in roots for part in _PARTS), *_STORES, *_SETTINGS, *packages]
    # The interpreter's own path may lead through links to a folder outside its prefixes.
    wanted += [str(link) for link in _followed(Path(sys.executable))]
    folders: dict[str, str] = {}
    links: dict[str, str] = {}
    for path in sorted(dict.fromkeys(filter(os.path.exists, wanted)), key=len):
        if _is_below(path, folders) or _is_below(path, links):
            continue
        source = os.path.realpath(path)
        if Path(path).is_symlink() and _is_below(source, [*folders, *wanted]):
            links[path] = source
        else:
            folders[path] = source
    return View(
        python=sys.executable,
        packages=tuple(packages),
        folders=tuple((source, path) for path, source in folders.items()),
        links=tuple((source, path) for path, source in links.items()),
    )


def _followed(path: Path) -> Iterator[Path]:
    """Yield each link from a path to the file that it finally names, then that file."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path


def _is_below(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(f"{other}/") for other in others)


READY, FILTER = 3, 4
"""Descriptors of the code's process: a socket on which it asks for permission to start, and bubblewrap's filter."""

START_FAILED = 97
NOBODY = 65534

MOST_OPEN_FILES, MOST_PROCESSES = 64, 32

RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The kind of isolation: `bubblewrap`, `namespaces` (set up by this package), or `limits` (no isolation).

    `privileged`: isolated with root's rights, which are dropped before the code begins; else in a user namespace.
    `proc`: with a `/proc` of its own, which some containers forbid.
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
    """A launch describes one run of code and its limits."""

    code: str
    way: Isolation
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
        return cls(**given | {"way": Isolation(**given["way"]), "view": View(**given["view"])})

    @property
    def work_folder(self) -> str:
        return WORK_FOLDER if self.way.isolates else self.folder

    def environment(self) -> dict[str, str]:
        """Return the code's environment variables; none come from this process, whose variables may hold tokens."""
        programs = [str(Path(self.view.python).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        folder = self.work_folder
        return {
            "PATH": os.pathsep.join(programs),
            "LANG": "C.UTF-8",
            "HOME": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # Each of glibc's arenas reserves up to 128 MiB of address space: a pool of two processes reached the limit.
            "MALLOC_ARENA_MAX": "1",
        }

    def runner_command(self, user: int = -1) -> list[str]:
        """Return the command of the runner, which then executes the code as `user`; -1 keeps the current user."""
        # The kernel counts the processes of a user. The user `nobody` belongs to the whole machine, so for it the
        # kernel would count other programs, too.
        processes = MOST_PROCESSES if self.way.isolates and user != NOBODY else -1
        numbers = (user, READY, self.cpu_seconds, self.memory_bytes, self.file_bytes, MOST_OPEN_FILES, processes, 0)
        return [self.view.python, "-I", "-S", "-B", "-c", RUNNER, *map(str, numbers), *self.view.packages]


def user_of_its_own() -> int:
    """Return a user id for code that root starts: one that no other run has, or that of `nobody` if too few are mapped.

    The kernel limits processes per user, so runs that share a user would share one limit.
    """
    first, count = 0x70000000, 0x400000
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        inside, _, length = map(int, line.split())
        if inside <= first and first + count <= inside + length:
            return first + os.getpid() % count
    return NOBODY


def sealed_file(content: bytes) -> int:
    """Return a file in memory that no process can change, positioned at its beginning."""
    file = os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    written = 0
    while written < len(content):
        written += os.write(file, content[written:])
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def start(exec_in_child: Callable[[], NoReturn], files: dict[int, int]) -> int:
    """Fork a child that keeps only `files` (new descriptor: ours) and calls `exec_in_child`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        # Copied to high numbers first, so that no copy overwrites another.
        apart = {wanted: fcntl.fcntl(file, fcntl.F_DUPFD, 64) for wanted, file in files.items()}
        for wanted, file in apart.items():
            os.dup2(file, wanted)
        _close_above(max(files))
        exec_in_child()
    except BaseException as error:  # noqa: BLE001 - a child must never go on as its parent
        os.write(2, f"{error.strerror if isinstance(error, OSError) else error!r}\n".encode())
    finally:
        os._exit(START_FAILED)


def _close_above(last: int) -> None:
    """Close every descriptor above `last` that is open.

    Up to the limit they would be a billion in many containers, a minute's work for a Python without `close_range`, as
    uv installs it.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > last:
            with contextlib.suppress(OSError):  # the descriptor by which the folder was listed
                os.close(int(name))


def exec_program(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - the purpose of this program
