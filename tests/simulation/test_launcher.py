"""Months of a launcher's failures in seconds: its real rules start each program again, or end the run, as they promise.

Time is simulated, and what happens depends on the seed alone. The promises are told here a second time, from the list
of all failures; rules with a planted bug break one of them.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from example_trainer.launcher import restarts as rules
from example_trainer.launcher.restarts import RestartBudget, Restarts
from example_trainer.processes.child import ChildFailed, ChildSpec, SupervisedProgram

from .oracle import PromiseBroken

EVENTS = int(os.environ.get("ATROPOS_SIMULATION_EVENTS", "100000")) // 4
BUDGET = RestartBudget(restarts=5, window_seconds=600.0)
NAMES = ("broker", "vllm", "environment", "trainer")
ERRORS = ("", "ValueError: one", "RuntimeError: another")
MEMORY = "torch.OutOfMemoryError: CUDA out of memory"
KILLS = (-signal.SIGKILL, -signal.SIGTERM)
READY_SECONDS = 20.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, SAME_FAILURES = 0.25, 30.0, 3
"""As promised; those of the rules may have a planted bug."""


@dataclass(kw_only=True, slots=True)
class Program(SupervisedProgram):
    """A program that ends when the simulation says so, with a code and a last line."""

    code: int | None = None
    line: str = ""
    ends_at: float = 0.0

    @property
    def exit_code(self) -> int | None:
        return self.code

    def last_lines(self, count: int = 1) -> list[str]:
        return [self.line]


@dataclass
class Programs:
    """The supervisor's part: it knows the programs that run or have failed."""

    known: dict[str, Program] = field(default_factory=dict)

    def failed(self) -> list[Program]:
        return [program for program in self.known.values() if program.code is not None]

    def stop(self, name: str, *, grace_seconds: float) -> None:
        del self.known[name]

    def failure(self, children: Sequence[Program], note: str) -> ChildFailed:
        return ChildFailed(f"{[child.name for child in children]} {note}", exit_code=1)


@dataclass
class Launch:
    """One run under the launcher's rules, until they end it."""

    chance: random.Random
    now: float = 0.0
    ended: bool = False
    programs: Programs = field(default_factory=Programs)
    failures: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: {name: [] for name in NAMES})
    due_at: dict[str, float] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    memory_kills: int = 0

    def __post_init__(self) -> None:
        self.restarts = Restarts(
            self.programs,  # type: ignore[arg-type]
            BUDGET,
            clock=lambda: self.now,
            kernel_kills=lambda: self.memory_kills,
        )
        for name in NAMES:
            self.start(ChildSpec(name=name, command=(name,), may_restart=True), 0)

    def start(self, spec: ChildSpec, restarted: int) -> None:
        assert spec.name not in self.programs.known, f"{spec.name} is started beside itself"
        patience = self.chance.choice((30.0, 300.0, 5000.0))
        self.programs.known[spec.name] = Program(
            spec=spec,
            log_path=Path(),
            started_at=self.now,
            restarted=restarted,
            ends_at=self.now + self.chance.expovariate(1 / patience),
        )

    def step(self) -> None:
        """Go on to the next look of the launcher at its programs: it looks often while something is to be started."""
        ends = min((program.ends_at for program in self.programs.known.values()), default=self.now)
        pause = self.chance.uniform(0.02, 0.5)
        self.now = self.now + pause if self.due_at else max(ends, self.now + pause)
        for program in self.programs.known.values():
            if self.now - program.started_at >= READY_SECONDS:
                self.ready.add(program.name)
            if program.ends_at <= self.now:
                self._end(program)
        self._judge()
        if not self.ended:
            self._start_due()

    def _end(self, program: Program) -> None:
        kind = self.chance.random()
        if kind < 0.5:
            program.code = self.chance.choice(KILLS)
        elif kind < 0.98:
            program.code, program.line = self.chance.choice((0, 1, -signal.SIGSEGV)), self.chance.choice(ERRORS)
        elif kind < 0.985:
            program.code, program.line = 2, "error: refused"
        elif kind < 0.99:
            program.code, program.line = 1, MEMORY
        else:
            program.code, self.memory_kills = -signal.SIGKILL, self.memory_kills + 1

    def _judge(self) -> None:
        failed = self.programs.failed()
        if not failed:
            return
        kernel = self.memory_kills > 0
        final = [self._is_final(program, kernel=kernel and program.code == -signal.SIGKILL) for program in failed]
        judged = self.restarts.judge_failures({*NAMES} - self.ready)
        try:
            self.restarts.plan(judged)
        except ChildFailed as error:
            if not any(final):
                raise PromiseBroken(f"the run ended without a reason: {error}") from None
            self.ended = True
            return
        assert not any(final), f"what no restart can fix was planned to be started again: {failed}"

    def _is_final(self, program: Program, *, kernel: bool) -> bool:
        """Tell from the list of failures if this one ends the run; if not, note when the program is due."""
        killed = program.code in KILLS
        known = self.failures[program.name]
        error = "" if killed else f"{program.code} {program.line}"
        known.append((self.now, error))
        recent = [time for time, _ in known if self.now - time <= BUDGET.window_seconds]
        last = known[-SAME_FAILURES:]
        near = all(later - earlier <= BUDGET.window_seconds for (earlier, _), (later, _) in pairwise(last))
        same = len(last) == SAME_FAILURES and near and len({error for _, error in last}) == 1 and error != ""
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(recent) - 1), LONGEST_PAUSE_SECONDS)
        self.due_at[program.name] = self.now + pause
        never_ready = program.name not in self.ready and (program.code or 0) >= 0
        refused = program.code == 2 or program.line == MEMORY
        return kernel or refused or never_ready or same or len(recent) > BUDGET.restarts

    def _start_due(self) -> None:
        expected = {name for name, time in self.due_at.items() if time <= self.now}
        started = self.restarts.due()
        assert {spec.name for spec, _ in started} == expected, "each program is started once, when its pause has ended"
        for spec, restarted in started:
            del self.due_at[spec.name]
            assert restarted == len(self.failures[spec.name])
            self.start(spec, restarted)


def simulate(seed: int, events: int) -> tuple[int, int]:
    """Let launches follow one another; return how many there were, and how many programs were started again."""
    chance, launches, started = random.Random(seed), 1, 0
    launch = Launch(chance)
    for _ in range(events):
        launch.step()
        if launch.ended:
            started += sum(map(len, launch.failures.values()))
            launch, launches = Launch(chance), launches + 1
    return launches, started


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_programs_are_started_again_within_their_budget_and_a_run_ends_for_a_reason_alone(seed: int) -> None:
    launches, started = simulate(seed, EVENTS)
    assert launches > EVENTS / 2_000
    assert started > EVENTS / 200


def start_twice(patch: pytest.MonkeyPatch) -> None:
    due = Restarts.due

    def keep(self: Restarts) -> list[tuple[ChildSpec, int]]:
        pending = dict(self._pending)
        found = due(self)
        self._pending.update(pending)
        return found

    patch.setattr(Restarts, "due", keep)


def forget_the_window(patch: pytest.MonkeyPatch) -> None:
    note = Restarts._note

    def renew(self: Restarts, child: SupervisedProgram, *, error: str) -> str | None:
        if known := self._histories.get((child.name, False)):
            known.failed_at.extend([self._clock()] * len(known.failed_at))
        return note(self, child, error=error)

    patch.setattr(Restarts, "_note", renew)


def lose_a_program(patch: pytest.MonkeyPatch) -> None:
    due = Restarts.due
    patch.setattr(Restarts, "due", lambda self: due(self)[:1])


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a program is started twice": start_twice,
    "a failure never grows old": forget_the_window,
    "of two programs that are due one is forgotten": lose_a_program,
    "the same error is never one too many": lambda patch: patch.setattr(rules, "SAME_FAILURES", 1000),
    "the first pause is a second": lambda patch: patch.setattr(rules, "FIRST_PAUSE_SECONDS", 1.0),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_of_the_launcher_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        simulate(5, 25_000)
