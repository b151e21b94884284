"""The kernel's control groups (version 2 or 1): those of this process, their limits, and what the kernel ended in them.

A container has the cores and the memory that its groups allow: the counts of the machine, which Python and psutil give,
can be a hundred times as large, and the kernel ends a program that uses more memory than its group may.

A group below this one, such as that of a sandbox, has counts of its own: model code that reaches its memory limit is
no sign that a run lacks memory. The count of the whole machine, in /proc/vmstat, has such processes too, and those of
other containers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")

_MEMORY_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""By controller: the file of the limit, that of what is used, and what the entries of a whole group begin with."""


def own_groups(proc: Path = PROC) -> dict[str, Path]:
    """Return this process's group by controller, version 2 under the name "".

    Raises `OSError` where there are none.
    """
    mounts = dict(_mounts(proc))
    found = {}
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name in mounts:
                root, folder = mounts[name]
                relative = path.removeprefix(root.rstrip("/"))
                if not relative.startswith("/.."):
                    found[name] = folder / relative.lstrip("/")
    return found


def count_kernel_kills(proc: Path = PROC) -> int:
    """Return the number of processes of this group that the kernel has ended for lack of memory; 0 if it is unknown.

    Where the group has no count (an old kernel, the root group), it is that of the machine since it started.
    """
    try:
        groups = own_groups(proc)
    except (OSError, ValueError):
        groups = {}
    counts = ((groups.get(""), "memory.events.local"), (groups.get("memory"), "memory.oom_control"))
    for folder, name in counts:
        if folder is not None and (count := _entry(folder / name, "oom_kill")) is not None:
            return count
    return _entry(proc / "vmstat", "oom_kill") or 0


def memory_limit_bytes(machine_bytes: int, proc: Path = PROC) -> int:
    """Return the memory that this process may use in all, on a machine that has `machine_bytes`."""
    return min([machine_bytes, *(limit for limit, _ in _memory(proc))])


def free_memory_bytes(machine_bytes: int, proc: Path = PROC) -> int:
    """Return the memory that is free for this process, on a machine where `machine_bytes` are."""
    return min([machine_bytes, *(max(0, limit - used) for limit, used in _memory(proc))])


def usable_cores(proc: Path = PROC) -> int:
    """Return the number of cores that this process may keep busy, rounded up."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affine, *_quotas(proc)]))


def _quotas(proc: Path) -> Iterator[int]:
    """Yield the limit of each group that this process is in, in whole cores."""
    for controller, folder in _with_parents(proc, ("", "cpu")):
        try:
            if controller:
                quota, period = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
                allowed, every = quota.read_text(), period.read_text()
            else:
                allowed, every = (folder / "cpu.max").read_text().split()
            if int(allowed) > 0:
                yield -(-int(allowed) // int(every))
        except (OSError, ValueError):  # the root group has no such file, and "max" is no limit
            continue


def _memory(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that this process is in, and what is used of it.

    Pages of files do not count as used: the kernel gives them up before it ends a program.
    """
    for controller, folder in _with_parents(proc, tuple(_MEMORY_FILES)):
        limit, used, whole = _MEMORY_FILES[controller]
        try:
            found = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):  # the root group has no such files, and "max" is no limit
            continue
        pages = (_entry(folder / "memory.stat", f"{whole}{kind}_file") or 0 for kind in ("active", "inactive"))
        yield found[0], found[1] - sum(pages)


def _with_parents(proc: Path, controllers: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield this process's groups of these controllers and those above them, whose limits hold for it as well."""
    try:
        groups = own_groups(proc)
    except (OSError, ValueError):  # another system than Linux
        return
    for controller in controllers:
        if controller in groups:
            yield from ((controller, folder) for folder in (groups[controller], *groups[controller].parents))


def _mounts(proc: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield each controller with the root of its mount and the mount point."""
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, folder = before.split()[3:5]
        kind, _, options = after.split(None, 2)
        if kind == "cgroup2":
            yield "", (root, Path(folder))
        elif kind == "cgroup":
            for name in options.split(","):
                yield name, (root, Path(folder))


def _entry(path: Path, name: str) -> int | None:
    """Return an entry of a file of counts, or None if it has none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
