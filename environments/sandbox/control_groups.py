"""The memory and processes of a run as a whole: control groups (version 2 or 1), by which the kernel enforces their
limits, and measurements. The values of the limits are in `python_tool` and `launch`, those of a single process in
`runner`; `supervisor` watches the time.

A group can be made where this process may write below its own group or below that group's parent: as root in most
places, as a user where systemd has delegated a part of the tree. Elsewhere the supervisor itself measures the
processes of a run (`descendants`, `measure`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atropos_api.common.control_groups import own_groups

PREFIX = "atropos-sandbox-"
_STALE_SECONDS = 60.0
_REMOVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The control group of one run. `folders` are those of its controllers, which in version 2 are all one folder."""

    folders: Mapping[str, Path]
    unified: bool

    def limit(self, memory_bytes: int, processes: int) -> None:
        memory = self.folders["memory"]
        _write(memory / ("memory.max" if self.unified else "memory.limit_in_bytes"), memory_bytes)
        optional = {"memory.swap.max": 0, "memory.oom.group": 1}
        if not self.unified:
            optional = {"memory.memsw.limit_in_bytes": memory_bytes}
        for name, value in optional.items():
            # These files are missing without swap and in older kernels.
            with contextlib.suppress(OSError):
                _write(memory / name, value)
        _write(self.folders["pids"] / "pids.max", processes)

    def enter(self) -> None:
        """Move this process into the group."""
        for folder in dict.fromkeys(self.folders.values()):
            _write(folder / "cgroup.procs", 0)

    def ran_out_of_memory(self) -> bool:
        """Return True if the kernel has killed a process of this group for its memory."""
        name = "memory.events" if self.unified else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (self.folders["memory"] / name).read_text().splitlines():
                word, _, count = line.partition(" ")
                if word == "oom_kill":
                    return int(count) > 0
        return False

    def remove(self) -> None:
        """Remove the group, waiting up to a second for its last process to exit."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        for folder in dict.fromkeys(self.folders.values()):
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.002)
                else:
                    break


@dataclass(slots=True)
class ControlGroups:
    """The parents of the control groups of runs: `make` creates a group below them."""

    places: Mapping[str, Path]
    unified: bool

    def make(self) -> ControlGroup:
        # The process id alone is not unique: containers that share a tree have the same process ids.
        name = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        folders = {controller: place / name for controller, place in self.places.items()}
        for folder in dict.fromkeys(folders.values()):
            folder.mkdir()
        return ControlGroup(folders, self.unified)

    def sweep(self) -> None:
        """Remove old groups of supervisors that were killed; the kernel refuses to remove groups in use."""
        for place in dict.fromkeys(self.places.values()):
            for folder in place.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):
                    if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                        folder.rmdir()


def find() -> ControlGroups | None:
    """Return where groups that limit memory and processes can be made; None if nowhere."""
    own = own_groups()
    unified, memory, pids = own.get(""), own.get("memory"), own.get("pids")
    for use_parent in (False, True):
        if unified is not None:
            place = unified.parent if use_parent else unified
            groups = ControlGroups({"memory": place, "pids": place}, unified=True)
            if _works(groups):
                return groups
        if memory is not None and pids is not None:
            places = {"memory": memory, "pids": pids}
            groups = ControlGroups(
                {name: path.parent if use_parent else path for name, path in places.items()}, unified=False
            )
            if _works(groups):
                return groups
    return None


def _works(groups: ControlGroups) -> bool:
    """Return True if a group can be made, limited and entered there. It is tried, since permissions do not show it."""
    groups.sweep()
    group = None
    try:
        group = groups.make()
        group.limit(64 << 20, 16)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                group.enter()
                code = 0
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1] == 0
    except OSError:
        return False
    finally:
        if group is not None:
            group.remove()


def _write(file: Path, number: int) -> None:
    """Write to an existing file only: a folder above a hierarchy's root is a plain folder, no control group."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(number).encode())
    finally:
        os.close(descriptor)


Children = Callable[[int], list[int]]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that processes use: threads as the kernel's limits count them, CPU time with that of ended children."""

    memory_bytes: int
    threads: int
    cpu_seconds: float


def descendants(root: int) -> list[int]:
    """Return the descendants of `root`, parents first."""
    children: Children = _children_of if os.path.exists(f"/proc/{root}/task/{root}/children") else _by_parent()  # noqa: PTH110
    found = []
    waiting = [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def measure(pids: Iterable[int], *, enough_bytes: int) -> Usage:
    """Measure the processes. Shared pages are divided between them only if the plain sum exceeds `enough_bytes`."""
    pids = list(pids)
    memory = threads = 0
    cpu = 0.0
    for pid in pids:
        # A process may end at any moment.
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS
            threads += int(fields[17])
            memory += int(fields[21]) * _PAGE_BYTES + _kibibytes(f"/proc/{pid}/status", "VmSwap:")
    if memory > enough_bytes:
        memory = sum(map(_own_share, pids))
    return Usage(memory, threads, cpu)


def _own_share(pid: int) -> int:
    """Return a process's memory with its part of shared pages, or with all of them if it cannot be inspected."""
    for file, names in (
        (f"/proc/{pid}/smaps_rollup", ("Pss:", "SwapPss:")),
        (f"/proc/{pid}/status", ("VmRSS:", "VmSwap:")),
    ):
        with contextlib.suppress(OSError):
            return _kibibytes(file, *names)
    return 0


def _kibibytes(file: str, *names: str) -> int:
    lines = (line.split() for line in _read(file).splitlines())
    return sum(int(words[1]) << 10 for words in lines if words and words[0] in names)


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _by_parent() -> Children:
    """Return `_children_of` from one scan of all processes, for kernels that do not list children."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError):
            parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(name))
    return lambda pid: below.get(pid, [])


def _read(file: str) -> str:
    with open(file, encoding="utf-8", errors="replace") as opened:  # noqa: PTH123 - called hundreds of times a second
        return opened.read()
