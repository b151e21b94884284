"""Finds and ends the processes of a launcher, by descent and by an inherited mark, never by name, port or user.

Every child is started with `MARK_VARIABLE` set to a unique value, which begins with that of its run. A process that
leaves its parent, its session and its process group still has the mark in its environment, so a run can always
distinguish its own processes from others'. `python_path` lets children import the code that this process runs, from any
folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

import example_trainer
from atropos_api.common.secrets import program_words

MARK_VARIABLE = "ATROPOS_RUN_TREE"
ORPHAN_GRACE_SECONDS = 1.5
SECOND_GRACE_SECONDS = 2.5
"""Time after a second SIGTERM: an environment then cancels its rollouts, which clean up within 2 s."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants in the block, so that they can still be found by descent."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of each process of this host, read once; psutil would read the table at every call."""
    table: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (parent := _parent_of(entry.name)) is not None:
            table.setdefault(parent, []).append(int(entry.name))
    return table


def descendants(pid: int, table: dict[int, list[int]]) -> list[int]:
    """Return all direct and indirect children of `pid` according to `table`."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = table.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def reap_adopted(known: Iterable[int], table: dict[int, list[int]]) -> None:
    """Reap adopted descendants that have exited; those in `known` are waited for elsewhere."""
    for pid in set(table.get(os.getpid(), [])) - set(known):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def is_alive(process: psutil.Process) -> bool:
    """Return True if it runs and is still the same process; a zombie counts as exited."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    """Return `pid 4711 (python -m http.server)` as far as readable, without arguments, which may hold secrets."""
    try:
        command = program_words(process.cmdline()).strip() or process.name()
    except psutil.Error:
        return f"pid {process.pid}"
    return f"pid {process.pid} ({command[:120]})"


def find_tree(roots: Iterable[psutil.Process], mark: str) -> list[psutil.Process]:
    """Return the running `roots`, their descendants, and the processes whose mark begins with `mark`; not this one."""
    found = {process.pid: process for process in (_marked(mark) if mark else ())}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            found.update((process.pid, process) for process in (root, *root.children(recursive=True)))
    found.pop(os.getpid(), None)
    return [process for process in found.values() if is_alive(process)]


def end_processes(
    find: Callable[[], list[psutil.Process]],
    *,
    grace_seconds: float,
    is_urgent: Callable[[], bool] = lambda: False,
    asks_twice: bool = True,
) -> None:
    """Send SIGTERM to the heads of the processes that `find` returns, again to those that have not ended within the
    grace if `asks_twice`, and then SIGKILL to all that remain. The grace ends early, without a second SIGTERM, once
    `is_urgent` returns True.

    Heads are the processes whose parent is not among those found: a server that gets SIGTERM ends its own workers,
    and one whose workers get it first waits for their answers for ever. Processes that a head leaves behind get a
    short grace of their own. Resource trackers are killed last: one that outlives the rest removes the named
    semaphores of the processes that were killed.
    """
    heads = _heads(find())
    _signal_all(heads, signal.SIGTERM)
    wait_until(lambda: is_urgent() or not any(map(is_alive, heads)), grace_seconds)
    if asks_twice and grace_seconds and not is_urgent() and (busy := list(filter(is_alive, heads))):
        _signal_all(busy, signal.SIGTERM)
        wait_until(lambda: is_urgent() or not any(map(is_alive, busy)), SECOND_GRACE_SECONDS)
    if not any(map(is_alive, heads)):
        _signal_all(_heads(find()), signal.SIGTERM)
        if wait_until(lambda: not find(), min(grace_seconds, ORPHAN_GRACE_SECONDS)):
            return
    _signal_all([process for process in find() if not _is_resource_tracker(process)], signal.SIGKILL)
    if wait_until(lambda: not find(), 1.0):
        return
    _signal_all(find(), signal.SIGKILL)
    wait_until(lambda: not find(), 2.0)


def wait_until(reached: Callable[[], bool], limit_seconds: float, *, interval_seconds: float = 0.05) -> bool:
    """Wait until `reached` holds; return False if it did not within the limit."""
    deadline = time.monotonic() + limit_seconds
    while not reached():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_seconds)
    return True


def _marked(mark: str) -> list[psutil.Process]:
    needle = f"{MARK_VARIABLE}={mark}".encode()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for pid in pids if _environment_holds(pid, needle) and (process := open_process(pid))]


def _environment_holds(pid: int, beginning: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(beginning) for variable in variables)
    except OSError:
        return False


def _parent_of(pid: str) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 1 :].split()[1])  # the name in brackets may itself hold brackets


def open_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _heads(processes: list[psutil.Process]) -> list[psutil.Process]:
    pids = {process.pid for process in processes}
    heads = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in pids:
                heads.append(process)
    return heads


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any(_RESOURCE_TRACKER in part for part in process.cmdline())
    except psutil.Error:
        return False


def _signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


PACKAGE_ROOT = Path(example_trainer.__file__).resolve().parents[1]


def python_path() -> str:
    """Return `PYTHONPATH` for children: the folder of our packages first, then the present value."""
    return os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
