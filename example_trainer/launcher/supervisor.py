"""Starts the programs of a run, notices when one ends, and ends them all, leaving nothing behind.

Each child has a session and process group of its own and writes to a log file; the kernel kills it when the launcher
ends. No process is ever ended by name or port. `failed` is called from the launcher's loop and returns each program
that has ended, or has lost a long-lived process, although it should be running; `restarts` decides about it.
"""

from __future__ import annotations

import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from atropos_api.common.errors import REFUSED
from example_trainer.errors import STOPPED_BY_HEALTH
from example_trainer.launcher.run_dir import write_yaml
from example_trainer.processes.child import (
    Child,
    ChildFailed,
    ChildSpec,
    Descendant,
    LostProcess,
    SupervisedProgram,
    spawn,
)
from example_trainer.processes.cleanup import Guardian, SharedMemoryLedger
from example_trainer.processes.program_log import SHOWN_LINES, limit_size, reason, signal_name
from example_trainer.processes.scratch import make_scratch, name_scratch, scratch_variables
from example_trainer.processes.tree import (
    MARK_VARIABLE,
    children_by_parent,
    descendants,
    describe,
    end_processes,
    find_tree,
    is_alive,
    open_process,
    reap_adopted,
)

EXPLAINED_IN_ONE_LINE = frozenset({REFUSED, STOPPED_BY_HEALTH})
"""Exit codes of a program whose last line is enough."""

STOP_GRACE_SECONDS = 10.0
"""Time for programs to end after the run's end."""
FAILURE_GRACE_SECONDS = 3.0
"""The same after a failure or a signal; the trainer, which may have to write a checkpoint, is stopped before."""
OBSERVE_INTERVAL_SECONDS = 1.0
LEAST_FREE_BYTES = 64 * 1024
"""Free space on a disk, at which programs that write to it fail."""

_COMPILING = ("torch/_inductor", "cdll.LoadLibrary")
"""Words of torch's compile workers, and of the process in which it loads a first library: on a busy machine either runs
for longer than a process has to be settled."""

# A child's own process that has run this long is needed by the child, so its end is a failure.
SETTLED_AFTER_SECONDS = 3.0


class Supervisor:
    """Starts, watches and ends the children of one launcher; leaving its context ends them all."""

    def __init__(self, log_dir: Path, *, detached: bool = False) -> None:
        """Keep the log directory; `detached` is for a process whose starter kills its children (see `Guardian`)."""
        self._log_dir = log_dir
        self._mark = uuid.uuid4().hex
        self._starts = itertools.count(1)
        # A directory of its own keeps sockets and scratch files of killed children findable.
        self._temporary_dir = str(name_scratch(f"atropos-{self._mark[:12]}"))
        self._shared_memory = SharedMemoryLedger()
        # Before the directory is made, so that a launcher that is killed between the two leaves no directory.
        self._guardian: Guardian | None = Guardian(
            mark=self._mark, temporary_dir=self._temporary_dir, detached=detached
        )
        make_scratch(self.scratch)
        self._children: dict[str, Child] = {}
        self._observed_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_seconds=STOP_GRACE_SECONDS if error is None else FAILURE_GRACE_SECONDS)

    @property
    def scratch(self) -> Path:
        """The temporary directory of the run, which is removed with it, also after a kill."""
        return Path(self._temporary_dir)

    def __getitem__(self, name: str) -> SupervisedProgram:
        return self._children[name]

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def find(self, name: str) -> SupervisedProgram | None:
        return self._children.get(name)

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def start(self, spec: ChildSpec, *, restarted: int = 0) -> SupervisedProgram:
        """Start a program, after `restarted` earlier restarts; its output goes to `<log dir>/<name>.log`."""
        log_path = self._log_dir / f"{spec.name}.log"
        mark = f"{self._mark}.{next(self._starts)}."
        process = spawn(self._command(spec), environment=self._environment(spec, mark), log_path=log_path)
        child = Child(
            spec=spec,
            process=process,
            handle=psutil.Process(process.pid),
            mark=mark,
            log_path=log_path,
            started_at=time.monotonic(),
            restarted=restarted,
        )
        self._children[spec.name] = child
        return child

    def failed(self) -> list[SupervisedProgram]:
        """Return the children that ended, or lost a long-lived process, although they should be running."""
        if any(child.has_failed for child in self):
            time.sleep(0.3)  # failures that follow from the first one are reported in the same message
            return [child for child in self if child.has_failed]
        self._note_shared_memory()
        now = time.monotonic()
        if now - self._observed_at >= OBSERVE_INTERVAL_SECONDS:
            self._observed_at = now
            self._observe(now)
        return [child for child in self if child.is_broken(now)]

    def failure(self, children: Sequence[SupervisedProgram], *, note: str = "") -> ChildFailed:
        """Return the error that reports these failures: one line for refusals, else the last lines of each log."""
        refused = [child for child in children if child.exit_code in EXPLAINED_IN_ONE_LINE]
        if refused and len(refused) == len(children):
            return ChildFailed("; ".join(_refusal(child) for child in refused), exit_code=refused[0].exit_code or 1)
        return ChildFailed("\n".join(_report(child, note) for child in children), exit_code=1)

    def wait_for_end(self, child: SupervisedProgram, on_tick: Callable[[], None]) -> None:
        """Wait until a program ends, calling `on_tick` meanwhile; raise `ChildFailed` if it or another one fails."""
        while child.exit_code is None:
            on_tick()
            self._check()
            time.sleep(0.1)
        self._check()

    def _check(self) -> None:
        if failed := self.failed():
            raise self.failure(failed)

    def forget(self, name: str) -> None:
        """Stop watching a program that has ended."""
        del self._children[name]

    def stop(
        self, name: str, *, grace_seconds: float = STOP_GRACE_SECONDS, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        """End one child and all of its processes, also those that were never observed, and stop watching it.

        The grace ends early once `is_urgent` returns True.
        """
        child = self._children.pop(name)
        found = [child.handle, *child.descendants]

        def running() -> list[psutil.Process]:
            # A process whose parent has ended is not found as a descendant: it is found by the mark, or is known
            # because it was found before.
            found[:] = find_tree(found, child.mark)
            return list(found)

        end_processes(running, grace_seconds=grace_seconds, is_urgent=is_urgent)
        child.process.poll()

    def vacate(self, name: str) -> None:
        """Release the placement of a stopped program that is not started again; on one machine there is none."""

    def close(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End every process of the run, remove what they left and dismiss the guardian; may be called again."""
        self._note_shared_memory()
        end_processes(self._running_processes, grace_seconds=grace_seconds)
        for child in self:
            child.process.poll()  # reaps one that ended since: `_running_processes` returns no zombies
        self._children.clear()
        self._shared_memory.sweep()
        shutil.rmtree(self._temporary_dir, ignore_errors=True)
        if self._guardian is not None:
            self._guardian.dismiss()
            self._guardian = None

    def _running_processes(self) -> list[psutil.Process]:
        self._note_shared_memory()  # a process that was just starting may map a segment before the signal reaches it
        for child in self:
            child.process.poll()  # collects the exit, so that it does not linger as a zombie
        self._reap(children_by_parent())
        roots = [process for child in self for process in (child.handle, *child.descendants)]
        return find_tree(roots, self._mark)

    def _command(self, spec: ChildSpec) -> tuple[str, ...]:
        """Return the command line; secret settings are in a last settings file, which overrides the others."""
        if not spec.secret_settings:
            return spec.command
        path = Path(self._temporary_dir) / f"{spec.name}-secrets.yaml"
        write_yaml(path, spec.secret_settings)
        return (*spec.command, "--config", str(path))

    def _environment(self, spec: ChildSpec, mark: str) -> dict[str, str]:
        own = {
            MARK_VARIABLE: mark,
            "SPT_NOENV": "1",  # setproctitle would otherwise write its title over the mark
            "PYTHONUNBUFFERED": "1",
            **scratch_variables(self.scratch),
        }
        return {**own, **spec.environment}

    def _observe(self, now: float) -> None:
        """Look at the children's own processes: note new ones, and record the loss of those that have ended.

        Logs that have become too large are shortened.
        """
        table = children_by_parent()
        self._reap(table)
        for child in self:
            self._observe_descendants(child, table, now)
            limit_size(child.log_path, child.spec.largest_log_bytes)

    def _observe_descendants(self, child: Child, table: dict[int, list[int]], now: float) -> None:
        size_before = len(child.descendants)
        known = {process.pid for process in child.descendants}
        # The pid of a child that has ended may be another process's by now.
        present = set() if child.exit_code is not None else set(descendants(child.process.pid, table))
        for process in filter(None, map(open_process, present - known)):
            child.descendants[process] = Descendant(seen_at=now)
        for process, seen in list(child.descendants.items()):
            if is_alive(process):
                seen.title = describe(process)
                if now - seen.seen_at < 2 * SETTLED_AFTER_SECONDS:
                    # It is read more than once, because a process has its parent's command before its exec, on a busy
                    # machine perhaps for seconds. After that its kind does not change, and reading it costs 0.2 ms.
                    is_short_task = _is_short_task(process, child)
                    seen.is_short_task = seen.is_short_task if is_short_task is None else is_short_task
                continue
            ended = child.descendants.pop(process)
            settled = now - ended.seen_at >= SETTLED_AFTER_SECONDS and not ended.is_short_task
            if settled and child.spec.watch_descendants and child.loss is None:
                child.loss = LostProcess(
                    title=f"its process {ended.title}",
                    noticed_at=now,
                    size_before=size_before,
                )

    def _note_shared_memory(self) -> None:
        processes = [process for child in self for process in (child.handle, *child.descendants)]
        fresh = self._shared_memory.observe(processes)
        if fresh and self._guardian is not None:
            self._guardian.note_shared_memory(fresh)

    def _reap(self, table: dict[int, list[int]]) -> None:
        guardian = [self._guardian.pid] if self._guardian is not None else []
        reap_adopted([*(child.process.pid for child in self), *guardian], table)


def _is_short_task(process: psutil.Process, child: Child) -> bool | None:
    """Return True for another program, and for those in Python by which torch compiles and tries what it compiled.

    None if the process does not tell: it may be ending.
    """
    try:
        # A new object: psutil keeps the first answer, which is the parent's program before an exec.
        program, command = psutil.Process(process.pid).exe(), process.cmdline()
    except psutil.Error:
        return None
    if not program:
        return None
    return program != child.handle.exe() or any(part in word for word in command for part in _COMPILING)


def _refusal(child: SupervisedProgram) -> str:
    """Return the line of a program's log that says what it refuses, else the last line, which says why it stopped."""
    # After such a line the program's own server may write further lines to the log.
    lines = [line for line in child.last_lines(3 * SHOWN_LINES) if line.strip()]
    refusals = [line for line in lines if ": error: " in line] if child.exit_code == REFUSED else []
    return f"{child.name}: {(refusals or lines or [f'exited {child.exit_code} without a message'])[-1]}"


def _report(child: SupervisedProgram, note: str) -> str:
    code, tail = child.exit_code, child.last_lines()
    why = "" if code is not None and code < 0 else reason(tail)
    lines = "".join(f"\n  {line}" for line in tail)
    with suppress(OSError):  # the log may be on another host
        if shutil.disk_usage(child.log_path.parent).free < LEAST_FREE_BYTES:
            why += f": the disk of {child.log_path.parent} is full"
    remark = f" ({note})" if note else ""
    return f"{child.name} {describe_end(child)}{why}{remark}; the end of {child.log_path}:{lines}"


def describe_end(child: SupervisedProgram) -> str:
    """Describe how a program ended, or which process it lost, and after how many seconds."""
    code = child.exit_code
    seconds = time.monotonic() - child.started_at
    if code is None and child.loss is not None:
        how = f"lost {child.loss.title}"
    elif code is not None and code < 0:
        how = f"was killed by {signal_name(-code)}"
    else:
        how = f"exited with code {code}"
    return f"{how} after {seconds:.1f} s{f', restarts: {child.restarted}' if child.restarted else ''}"
