"""Restarts of a run's programs: which failures a restart can fix, how often, and after which pause.

A program that was killed, or whose failure may be accidental, is started again after a pause that doubles. A run ends
at the first failure that a restart cannot fix: a refused configuration, a failure before the program was ever ready, a
lack of memory, or the same error three times in a row. Each program has a budget of its own, counted in a window of
time, so that a run of days may lose a server now and then, and a program that always fails ends its run in a minute.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from atropos_api.common.control_groups import count_kernel_kills
from atropos_api.common.errors import OUTAGE
from example_trainer.launcher.programs import LATEST_CHECKPOINT, TRAINER
from example_trainer.launcher.run_file import RunConfig
from example_trainer.launcher.supervisor import EXPLAINED_IN_ONE_LINE, FAILURE_GRACE_SECONDS, Supervisor, describe_end
from example_trainer.processes.child import ChildSpec, SupervisedProgram
from example_trainer.processes.program_log import reason

SAME_FAILURES = 3
RESUME_FLAG = "--resume"
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
COUNT_INTERVAL_SECONDS = 1.0
FREEING_SECONDS = 60.0
"""Time within which a process that the kernel kills has freed its memory, and ended."""
_LACKS_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|\bMemoryError\b|No available memory for the cache blocks", re.IGNORECASE
)
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals at which a program may stop in order."""
_OUTSIDE_SIGNALS = frozenset({signal.SIGKILL}) | _STOPS
"""Signals that come from outside: they say nothing about the program.

A program that stops in order at one exits with 128 + the number, as ours do, and so does a server whose engine was
killed while it started.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartBudget:
    """The number of restarts that each program has within a window of time."""

    restarts: int
    window_seconds: float
    outage_seconds: float = 0.0
    """The time that a program waits for another one before it ends with an outage."""

    def window_after(self, exit_code: int | None) -> float:
        """Return the window of failures of this kind; that of outages holds one more than there are restarts."""
        waits_seconds = (self.restarts + 1) * self.outage_seconds if exit_code == OUTAGE else 0.0
        return self.window_seconds + waits_seconds


@dataclass(kw_only=True, slots=True)
class _History:
    """The failures of one program: its outages, or all others."""

    failed_at: deque[float] = field(default_factory=deque)
    """Times of the failures within the window."""
    error: str = ""
    """The error line of the last failure; empty if it had none."""
    equal: int = 0
    """Number of failures in a row with that error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failed program, and the reason why no restart can fix it."""

    child: SupervisedProgram
    final_cause: str | None
    """None if a restart can fix it; empty if the program's log says why none can."""

    @property
    def name(self) -> str:
        return self.child.name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    spec: ChildSpec
    restarted: int
    due_at: float


class Restarts:
    """Decides for each failed program of a supervisor if it is started again, and when."""

    def __init__(
        self,
        supervisor: Supervisor,
        budget: RestartBudget,
        *,
        resumption: Resumption | None = None,
        clock: Callable[[], float] = time.monotonic,
        kernel_kills: Callable[[], int] | None = None,
    ) -> None:
        """`resumption` says what a trainer goes on from. `kernel_kills` counts the processes that the kernel has ended
        here for lack of memory so far.
        """
        self._supervisor = supervisor
        self._budget = budget
        self._resumption = resumption
        self._clock = clock
        self._kernel_kills = kernel_kills or count_kernel_kills
        self._killed_before, self._killed_at = self._kernel_kills(), float("-inf")
        self._counted_at = clock()
        self._histories: dict[tuple[str, bool], _History] = {}
        """By a program's name, and True for its outages, which are counted separately, else False."""
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, name: str) -> bool:
        """True for a program that has failed and will be started again after its pause."""
        return name in self._pending

    def cancel(self, name: str) -> None:
        """Do not start a program again, and forget its failures: a later one of this name is another program."""
        self._pending.pop(name, None)
        for is_outage in (False, True):
            self._histories.pop((name, is_outage), None)

    def judge_failures(self, never_ready: Collection[str], *, apart: Collection[str] = ()) -> list[Failure]:
        """Return the programs that have failed since the last call; each failure counts towards the budget.

        `never_ready` names the programs that have not been ready yet: if one of these exits by itself, its settings do
        not work. Failures of those in `apart` are left out.
        """
        failed = [child for child in self._supervisor.failed() if child.name not in apart]
        if failed or self._clock() - self._counted_at >= COUNT_INTERVAL_SECONDS:
            self._count_kernel_kills()
        return [Failure(child=child, final_cause=self._final_cause(child, never_ready)) for child in failed]

    def plan(self, failures: Sequence[Failure]) -> list[str]:
        """End what is left of each failed program and plan its restart; return a line for each.

        Raises `ChildFailed` if a restart cannot fix one of the failures.
        """
        for failure in failures:
            if failure.final_cause is not None:
                raise self._supervisor.failure([each.child for each in failures], note=failure.final_cause)
        return [self._plan_restart(failure.child) for failure in failures]

    def due(self) -> list[tuple[ChildSpec, int]]:
        """Return the programs whose pause has ended, as they are started now, each with its number of restarts so far;
        each is returned once.
        """
        now = self._clock()
        due = [pending for pending in self._pending.values() if pending.due_at <= now]
        for pending in due:
            del self._pending[pending.spec.name]
        return [(self._resumed(pending.spec), pending.restarted) for pending in due]

    def _resumed(self, spec: ChildSpec) -> ChildSpec:
        again = replace(spec, command=(*spec.command, *spec.restart_flags), restart_flags=())
        return again if self._resumption is None else self._resumption.resuming(again)

    def unfinished(self, names: Collection[str]) -> set[str]:
        """Return those of these programs that have not ended by themselves; one that failed since the last judgement
        is among them, because it may be started again.
        """
        found = {name: self._supervisor[name] for name in names if name not in self._pending}
        return {name for name in names if name not in found or found[name].exit_code is None or found[name].has_failed}

    def _final_cause(self, child: SupervisedProgram, never_ready: Collection[str]) -> str | None:
        """Note the failure; return the reason why no restart can fix it, "" if its log says so; None if one can."""
        code = child.exit_code
        if not child.spec.may_restart or code in EXPLAINED_IN_ONE_LINE:
            return child.spec.why_final
        by_chance = code is None or -code in _OUTSIDE_SIGNALS or code - 128 in _OUTSIDE_SIGNALS
        killed = by_chance or (code is not None and not 0 <= code <= 128)
        if child.name in never_ready and not (killed or code == OUTAGE):
            return "it has never been ready, so its settings do not work here"
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and self._clock() - self._killed_at <= FREEING_SECONDS:
            return "the kernel has ended a process for lack of memory; see dmesg, and give the run more or ask for less"
        lines = child.last_lines()
        if not killed and any(_LACKS_MEMORY.search(line) for line in lines):
            return "it lacks memory; `atropos doctor --memory` tells what fits"
        return self._note(
            child, error="" if by_chance or code == OUTAGE else f"{code} {reason(lines) or ''.join(lines[-1:])}"
        )

    def _count_kernel_kills(self) -> None:
        """Note when the kernel last ended a process of this run's control group."""
        self._counted_at, count = self._clock(), self._kernel_kills()
        if count > self._killed_before:
            self._killed_before, self._killed_at = count, self._counted_at

    def _note(self, child: SupervisedProgram, error: str) -> str | None:
        """Record a failure in the program's history; return the reason if it was one too many."""
        history, now, window_seconds = self._history(child), self._clock(), self._budget.window_after(child.exit_code)
        while history.failed_at and now - history.failed_at[0] > window_seconds:
            history.failed_at.popleft()
        history.equal = history.equal + 1 if error and history.failed_at and error == history.error else 1
        history.error = error
        history.failed_at.append(now)
        if history.equal >= SAME_FAILURES:
            return f"the same error {SAME_FAILURES} times in a row"
        if len(history.failed_at) > self._budget.restarts:
            return (
                f"it has failed {len(history.failed_at)} times within {window_seconds:.0f} s, and "
                f"--max-restarts is {self._budget.restarts}"
            )
        return None

    def _history(self, child: SupervisedProgram) -> _History:
        return self._histories.setdefault((child.name, child.exit_code == OUTAGE), _History())

    def _plan_restart(self, child: SupervisedProgram) -> str:
        number = len(self._history(child).failed_at)
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2 ** (number - 1), LONGEST_PAUSE_SECONDS)
        line = (
            f"{child.name} {describe_end(child)}; restart {number} of {self._budget.restarts} within "
            f"{self._budget.window_after(child.exit_code):.0f} s"
        )
        self._supervisor.stop(child.name, grace_seconds=FAILURE_GRACE_SECONDS)
        due_at = self._clock() + pause_seconds
        self._pending[child.name] = _Pending(spec=child.spec, restarted=child.restarted + 1, due_at=due_at)
        return line


class Resumption:
    """The checkpoint that a trainer which is started again goes on from: the newest one of this launch.

    One is made before the launch starts a program. If the user has gone back to a checkpoint, others in the folder may
    be newer than that, so `auto` would be wrong; `latest` is right once the trainer has moved it. That is seen by the
    link itself: it has its times from the file system's clock, which is not that of this machine.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._resume = config.resume
        self._latest = (config.save_path or run_dir) / LATEST_CHECKPOINT
        self._link_before = self._read_link()

    def resuming(self, spec: ChildSpec) -> ChildSpec:
        """Return a program as it is started again: the trainer continues from the run's newest checkpoint."""
        if spec.name != TRAINER:
            return spec
        first = spec.command[:-2] if RESUME_FLAG in spec.command else spec.command
        if self._resume in {None, "auto"}:
            return replace(spec, command=(*first, RESUME_FLAG, "auto"))
        if self._latest.exists() and self._read_link() != self._link_before:
            return replace(spec, command=(*first, RESUME_FLAG, str(self._latest.resolve())))
        return spec

    def _read_link(self) -> tuple[int, int] | None:
        """Return what tells the link from every other that has had its name; None if there is none."""
        try:
            found = self._latest.lstat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
