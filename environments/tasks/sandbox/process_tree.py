"""Which processes a run has, and what they hold together, for limits that no control group holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Children = Callable[[int], list[int]]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes hold: threads count as the kernel's limits count them, CPU time includes ended children's."""

    memory_bytes: int
    threads: int
    cpu_seconds: float


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents first."""
    children: Children = _children_of if os.path.exists(f"/proc/{root}/task/{root}/children") else _by_parent()  # noqa: PTH110
    found = []
    waiting = [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def measure(pids: Iterable[int], *, enough_bytes: int) -> Usage:
    """What those processes hold. Shared pages are told apart only once all together seem to hold `enough_bytes`."""
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
    """What a process holds, of shared pages its part; all of them if it does not let itself be looked into."""
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
    """The same from a look at all processes, for kernels that do not list children."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, IndexError):
            parent = int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(name))
    return lambda pid: below.get(pid, [])


def _read(file: str) -> str:
    with open(file, encoding="utf-8", errors="replace") as opened:  # noqa: PTH123 - called hundreds of times a second
        return opened.read()
