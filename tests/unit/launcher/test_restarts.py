"""A program that fails by chance is started again within its budget; one that cannot work ends the run at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from example_trainer.launcher.restarts import (
    COUNT_INTERVAL_SECONDS,
    FIRST_PAUSE_SECONDS,
    FREEING_SECONDS,
    LONGEST_PAUSE_SECONDS,
    RestartBudget,
    Restarts,
)
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import Child, ChildFailed, ChildSpec
from example_trainer.processes.tree import wait_until

SLEEP = "import time; time.sleep(600)"
WINDOW_SECONDS = 100.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path) as supervisor:
        yield supervisor


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def restarts(supervisor: Supervisor, clock: Clock) -> Restarts:
    return make(supervisor, clock)


def make(supervisor: Supervisor, clock: Clock, kernel_kills: Callable[[], int] = lambda: 0) -> Restarts:
    budget = RestartBudget(restarts=3, window_seconds=WINDOW_SECONDS)
    return Restarts(supervisor, budget, clock=clock, kernel_kills=kernel_kills)


def program(code: str, *, name: str = "vllm", may_restart: bool = True, why_final: str = "") -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-c", code), may_restart=may_restart, why_final=why_final)


def killed(child: Child, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(child.process.pid, number)
    assert wait_until(lambda: child.has_failed, 10)


def ended(child: Child) -> None:
    assert wait_until(lambda: child.has_failed, 10)


def start_due(supervisor: Supervisor, restarts: Restarts, clock: Clock) -> Child:
    clock.now += LONGEST_PAUSE_SECONDS
    ((spec, restarted),) = restarts.due()
    return supervisor.start(spec, restarted=restarted)


def test_a_killed_program_is_started_again_after_its_pause_and_once(supervisor, restarts, clock) -> None:
    first = supervisor.start(program(SLEEP))
    assert restarts.plan(restarts.judge_failures(())) == []
    killed(first)
    (line,) = restarts.plan(restarts.judge_failures(()))
    assert line.startswith("vllm was killed by SIGKILL after ")
    assert line.endswith("; restart 1 of 3 within 100 s")
    assert "vllm" in restarts
    assert "vllm" not in supervisor
    assert restarts.due() == []
    clock.now += FIRST_PAUSE_SECONDS
    ((spec, restarted),) = restarts.due()
    assert (spec, restarted) == (first.spec, 1)
    assert restarts.due() == []
    assert "vllm" not in restarts


def test_what_a_program_did_at_its_first_start_is_not_repeated(supervisor, restarts, clock) -> None:
    """A broker with --api.fresh deleted the store of its run when it was started again."""
    first = replace(program(SLEEP, name="broker"), restart_flags=("--no-fresh",))
    killed(supervisor.start(first))
    for _ in range(2):
        restarts.plan(restarts.judge_failures(()))
        killed(again := start_due(supervisor, restarts, clock))
        assert again.spec.command == (*first.command, "--no-fresh")


def test_pauses_double_while_failures_follow_each_other(supervisor, restarts, clock) -> None:
    for number in range(3):
        killed(supervisor.start(program(SLEEP)))
        restarts.plan(restarts.judge_failures(()))
        pause_seconds = FIRST_PAUSE_SECONDS * 2**number
        clock.now += pause_seconds * 0.9
        assert restarts.due() == []
        clock.now += pause_seconds * 0.1 + 1e-6
        assert len(restarts.due()) == 1


def test_one_failure_more_than_the_budget_ends_the_run_and_says_so(supervisor, restarts, clock) -> None:
    killed(supervisor.start(program(SLEEP)))
    for _ in range(3):
        restarts.plan(restarts.judge_failures(()))
        killed(start_due(supervisor, restarts, clock))
        clock.now -= LONGEST_PAUSE_SECONDS - 1
    with pytest.raises(ChildFailed, match=r"failed 4 times within 100 s, and --max-restarts is 3") as failure:
        restarts.plan(restarts.judge_failures(()))
    assert ", restarts: 3 (" in str(failure.value)
    assert failure.value.exit_code == 1


def test_failures_older_than_the_window_no_longer_count(supervisor, restarts, clock) -> None:
    child = supervisor.start(program(SLEEP))
    for _ in range(9):
        killed(child)
        (line,) = restarts.plan(restarts.judge_failures(()))
        assert "; restart 1 of 3 within" in line
        child = start_due(supervisor, restarts, clock)
        clock.now += WINDOW_SECONDS


def test_each_program_has_a_budget_of_its_own(supervisor, restarts, clock) -> None:
    for name in ("vllm", "vllm-2", "broker"):
        killed(supervisor.start(program(SLEEP, name=name)))
    assert ["; restart 1 of 3 " in line for line in restarts.plan(restarts.judge_failures(()))] == [True, True, True]
    clock.now += 1
    assert {spec.name for spec, _ in restarts.due()} == {"vllm", "vllm-2", "broker"}


@pytest.mark.parametrize("code", [2, 3])
def test_a_refusal_is_not_tried_again(supervisor, restarts, code) -> None:
    ended(supervisor.start(program(f"print('error: --lr -1 is below zero'); raise SystemExit({code})")))
    with pytest.raises(ChildFailed, match="--lr -1 is below zero") as failure:
        restarts.plan(restarts.judge_failures(()))
    assert failure.value.exit_code == code


def test_a_program_that_cannot_go_on_ends_the_run_with_the_reason(supervisor, restarts) -> None:
    killed(supervisor.start(program(SLEEP, name="broker", may_restart=False, why_final="its store was memory")))
    with pytest.raises(ChildFailed, match=r"was killed by SIGKILL after .* \(its store was memory\)"):
        restarts.plan(restarts.judge_failures(()))


def test_a_program_that_exits_before_it_was_ever_ready_is_not_tried_again_but_a_killed_one_is(
    supervisor, restarts, clock
) -> None:
    killed(supervisor.start(program(SLEEP)))
    assert len(restarts.plan(restarts.judge_failures({"vllm"}))) == 1
    restarts.due()
    ended(supervisor.start(program("raise ValueError('no such model')")))
    with pytest.raises(ChildFailed, match=r"no such model .*never been ready"):
        restarts.plan(restarts.judge_failures({"vllm"}))


def test_a_program_that_stops_in_order_at_a_signal_was_ended_by_chance_as_one_that_is_killed(
    supervisor, restarts, clock, tmp_path: Path
) -> None:
    stops = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); open({!r}, 'w'); time.sleep(600)"
    for number in range(3):  # the budget, and not the number of equal errors
        begun = tmp_path / f"begun-{number}"
        child = supervisor.start(program(stops.format(str(begun))))
        assert wait_until(begun.exists, 10)
        killed(child, signal.SIGTERM)
        assert child.exit_code == 143
        (line,) = restarts.plan(restarts.judge_failures({"vllm"}))
        assert f"restart {number + 1} of 3" in line
        clock.now += 10
        restarts.due()


def test_a_server_whose_engine_was_killed_before_it_was_ready_is_started_again(supervisor, restarts, clock) -> None:
    for number in range(3):
        ended(supervisor.start(program("raise SystemExit(137)")))
        (line,) = restarts.plan(restarts.judge_failures({"vllm"}))
        assert f"restart {number + 1} of 3" in line
        clock.now += 10
        restarts.due()


def test_a_program_that_always_waits_for_another_in_vain_ends_the_run(supervisor, clock) -> None:
    """Each had waited longer than the window, so that each of 200 was the first within it."""
    budget = RestartBudget(restarts=3, window_seconds=WINDOW_SECONDS, outage_seconds=WINDOW_SECONDS + 15)
    restarts = Restarts(supervisor, budget, clock=clock)
    for _ in range(3):
        ended(supervisor.start(program("raise SystemExit(75)")))
        assert len(restarts.plan(restarts.judge_failures(()))) == 1
        clock.now += WINDOW_SECONDS + 15
        restarts.due()
    ended(supervisor.start(program("raise SystemExit(75)")))
    with pytest.raises(ChildFailed, match="it has failed 4 times within"):
        restarts.plan(restarts.judge_failures(()))


def test_a_server_whose_engine_crashed_before_it_was_ready_is_started_again_as_one_that_crashed_itself(
    supervisor, restarts
) -> None:
    """By 139, 128 + SIGSEGV, its settings were to blame."""
    for code in ("raise SystemExit(139)", "import os; os.kill(os.getpid(), 11)"):
        ended(supervisor.start(program(code)))
        assert len(restarts.plan(restarts.judge_failures({"vllm"}))) == 1


def test_a_program_that_found_no_other_one_before_it_was_ready_is_started_again(supervisor, restarts) -> None:
    """A broker whose Redis came up later, and a resumed trainer whose broker did, ended the run as badly configured."""
    for name in ("broker", "trainer"):
        ended(supervisor.start(program("raise SystemExit(75)", name=name)))
        (line,) = restarts.plan(restarts.judge_failures({name}))
        assert "restart 1 of 3" in line


@pytest.mark.parametrize(
    "message",
    [
        "raise MemoryError",
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
        "raise ValueError('No available memory for the cache blocks')",
    ],
)
def test_a_lack_of_memory_is_not_tried_again(supervisor, restarts, message) -> None:
    ended(supervisor.start(program(message)))
    with pytest.raises(ChildFailed, match="it lacks memory"):
        restarts.plan(restarts.judge_failures(()))


def test_a_process_that_the_kernel_ended_for_lack_of_memory_is_not_started_again(supervisor, clock) -> None:
    kills = iter([7, 8])
    restarts = make(supervisor, clock, lambda: next(kills))
    killed(supervisor.start(program(SLEEP)))
    with pytest.raises(ChildFailed, match="lack of memory; see dmesg"):
        restarts.plan(restarts.judge_failures(()))


def test_a_process_that_the_kernel_ended_elsewhere_on_the_host_long_ago_says_nothing(supervisor, clock) -> None:
    kills = 0
    restarts = make(supervisor, clock, lambda: kills)
    child = supervisor.start(program(SLEEP))
    kills = 1
    clock.now += COUNT_INTERVAL_SECONDS
    assert restarts.plan(restarts.judge_failures(())) == []
    clock.now += FREEING_SECONDS + 1.0
    killed(child)
    (line,) = restarts.plan(restarts.judge_failures(()))
    assert "restart 1 of 3" in line


def test_the_same_error_three_times_in_a_row_ends_the_run_before_its_budget(supervisor, restarts, clock) -> None:
    ended(supervisor.start(program("raise ValueError('the same')")))
    for _ in range(2):
        restarts.plan(restarts.judge_failures(()))
        ended(start_due(supervisor, restarts, clock))
        clock.now -= LONGEST_PAUSE_SECONDS - 1
    with pytest.raises(ChildFailed, match="the same error 3 times in a row"):
        restarts.plan(restarts.judge_failures(()))


def test_different_errors_have_the_whole_budget(supervisor, restarts, clock) -> None:
    for number in range(3):
        ended(supervisor.start(program(f"raise ValueError('error {number}')")))
        assert len(restarts.plan(restarts.judge_failures(()))) == 1
        clock.now += 10
        restarts.due()


def test_a_trainer_that_was_killed_since_the_last_look_has_not_ended(supervisor, restarts) -> None:
    """The launcher took it for the end of the training, and started the final server on the port of its own server."""
    names = {"trainer", "environment"}
    trainer, environment = (
        supervisor.start(replace(program(code, name=name), ends_by_itself=True))
        for name, code in (("trainer", SLEEP), ("environment", ""))
    )
    assert wait_until(lambda: environment.exit_code == 0, 10)
    assert restarts.judge_failures(()) == []
    killed(trainer)
    assert restarts.unfinished(names) == {"trainer"}
    restarts.plan(restarts.judge_failures(()))
    assert restarts.unfinished(names) == {"trainer"}


def test_an_exit_with_0_of_a_server_is_a_failure_that_a_restart_can_fix(supervisor, restarts) -> None:
    ended(supervisor.start(program("")))
    (line,) = restarts.plan(restarts.judge_failures(()))
    assert "exited with code 0" in line
