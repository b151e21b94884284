"""The kernel's control groups (version 2 or 1): those of this process, and what the kernel ended in them.

A group below this one, such as that of a sandbox, has counts of its own: model code that reaches its memory limit is
no sign that a run lacks memory. The count of the whole machine, in /proc/vmstat, has such processes too, and those of
other containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


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
        if folder is not None and (count := _oom_kill(folder / name)) is not None:
            return count
    return _oom_kill(proc / "vmstat") or 0


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


def _oom_kill(path: Path) -> int | None:
    """Return the entry `oom_kill` of a file of counts, or None if it has none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
