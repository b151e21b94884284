"""Programs in seats: a gang is one program, a lost seat is replaced, and the rest runs beside the launcher."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from example_trainer.launcher.placement.roles import LocalPlacement, PlacementFailed, Places, ProgramState, Role
from example_trainer.launcher.placement.seat import SeatHost
from example_trainer.launcher.placement.seated_supervisor import SeatedSupervisor
from example_trainer.launcher.placement.testing import FakePlacement
from example_trainer.launcher.restarts import RestartBudget, Restarts
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.processes.cleanup import Guardian
from example_trainer.processes.tree import MARK_VARIABLE, wait_until

SERVER, TRAINER = Role(name="vllm"), Role(name="trainer", seats=2, is_reached=True)


@pytest.fixture
def placement() -> FakePlacement:
    return FakePlacement(free=4)


@pytest.fixture
def supervisor(tmp_path: Path, placement: FakePlacement) -> Iterator[SeatedSupervisor]:
    with SeatedSupervisor(tmp_path, placement, variables={"HF_HOME": "/models"}) as supervisor:
        supervisor.place([SERVER, TRAINER], lambda: None)
        yield supervisor


def spec(name: str) -> ChildSpec:
    return ChildSpec(
        name=name, command=("python", name), environment={"TOKEN": "t"}, ends_by_itself=True, may_restart=True
    )


def test_a_program_gets_the_listed_variables_and_its_own_and_a_server_nothing_else(supervisor, placement) -> None:
    supervisor.start(spec("vllm"))
    (started,) = placement.places["vllm"][0].started
    assert started.command == ("python", "vllm")
    assert started.environment == {"HF_HOME": "/models", "TOKEN": "t"}


def test_the_ranks_of_a_gang_meet_at_the_first_seat_and_are_told_their_own_address(supervisor, placement) -> None:
    supervisor.start(spec("trainer"))
    first, second = (seat.started[0] for seat in placement.places["trainer"])
    assert (first.name, second.name) == ("trainer", "trainer-rank-1")
    addresses = [seat.address for seat in placement.places["trainer"]]
    assert first.command == second.command == ("python", "trainer", "--init-method", f"tcp://{addresses[0]}:29500")
    assert [each.environment["MASTER_ADDR"] for each in (first, second)] == addresses
    assert [each.environment["RANK"] for each in (first, second)] == ["0", "1"]
    assert {each.environment["WORLD_SIZE"] for each in (first, second)} == {"2"}


def test_a_gang_has_ended_once_all_its_processes_have_and_fails_with_the_first_that_fails(
    supervisor, placement, tmp_path: Path
) -> None:
    program = supervisor.start(spec("trainer"))
    first, second = placement.places["trainer"]
    first.now = ProgramState(exit_code=0)
    assert supervisor.failed() == []
    assert program.exit_code is None
    second.now = ProgramState(exit_code=0)
    assert supervisor.failed() == []
    assert program.exit_code == 0
    second.now = ProgramState(exit_code=1)
    assert supervisor.failed() == [program]
    assert program.log_path == tmp_path / "trainer-rank-1.log", "the log of the process that failed"


def test_a_gang_fails_with_the_process_that_failed_and_not_with_one_that_lost_it_and_ended_sooner(
    supervisor, placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank ended with 2 before the first, which had crashed, was gone: the run was not started again."""
    program = supervisor.start(spec("trainer"))
    first, second = placement.places["trainer"]
    second.now = ProgramState(exit_code=2)
    assert supervisor.failed() == []
    first.now = ProgramState(exit_code=1)
    assert [failed.exit_code for failed in supervisor.failed()] == [1]
    assert program.log_path == tmp_path / "trainer.log"
    again = supervisor.start(spec("trainer"))
    second.now = ProgramState(exit_code=2)
    assert supervisor.failed() == []
    monkeypatch.setattr("example_trainer.launcher.placement.seated_supervisor._GANG_ENDS_SECONDS", 0.0)
    assert [failed.exit_code for failed in supervisor.failed()] == [2]
    assert again.log_path == tmp_path / "trainer-rank-1.log"


def test_a_lost_seat_ends_its_gang_which_is_placed_anew_as_a_whole(supervisor, placement) -> None:
    restarts = Restarts(supervisor, RestartBudget(restarts=2, window_seconds=60), clock=lambda: 0.0)
    supervisor.start(spec("trainer"))
    before = list(placement.places["trainer"])
    placement.free += 1  # another node
    placement.losses[before[1].name] = "its node has died"
    (line,) = restarts.plan(restarts.judge_failures(set()))
    assert line.startswith(f"trainer lost its seat on {before[1].address} (its node has died)")
    assert [seat.stops for seat in before] == [1, 1]
    assert "trainer" not in placement.places
    supervisor.start(spec("trainer"), restarted=1)
    assert wait_until(lambda: not supervisor.failed() and "trainer" in placement.places, 10)
    assert wait_until(lambda: not supervisor.failed() and all(s.started for s in placement.places["trainer"]), 10)
    assert not set(placement.places["trainer"]) & set(before)


def test_a_program_that_has_ended_well_is_not_started_again_when_its_node_is_lost_later(supervisor, placement) -> None:
    """The trainer would begin the finished run again, while its final evaluation goes on."""
    program = supervisor.start(spec("trainer"))
    for seat in placement.places["trainer"]:
        seat.now = ProgramState(exit_code=0)
    assert supervisor.failed() == []
    placement.losses[placement.places["trainer"][1].name] = "its node has died"
    assert supervisor.failed() == []
    assert program.exit_code == 0


def test_a_role_without_a_place_fails_once_more_with_what_was_wanted_and_free(supervisor, placement) -> None:
    placement.free = 0
    supervisor.start(spec("vllm"))
    placement.losses[placement.places["vllm"][0].name] = "its node has died"
    assert supervisor.failed() != []
    supervisor.stop("vllm")
    program = supervisor.start(spec("vllm"), restarted=1)
    assert program.exit_code is None
    assert wait_until(lambda: supervisor.failed() == [program], 10)
    assert program.loss is not None
    assert program.loss.title == "its place: wanted 1, free 0"


def test_a_program_that_fails_in_a_sound_seat_is_started_in_the_same_one(supervisor, placement) -> None:
    supervisor.start(spec("vllm"))
    (seat,) = placement.places["vllm"]
    seat.now = ProgramState(exit_code=-9)
    assert [child.name for child in supervisor.failed()] == ["vllm"]
    supervisor.stop("vllm")
    supervisor.start(spec("vllm"), restarted=1)
    assert len(seat.started) == 2
    assert supervisor.failed() == []


def test_a_server_that_is_added_later_gets_a_place_like_the_first_one_s(supervisor, placement) -> None:
    supervisor.start(spec("vllm-2"))
    assert wait_until(lambda: not supervisor.failed() and "vllm-2" in placement.places, 10)
    assert wait_until(lambda: not supervisor.failed() and placement.places["vllm-2"][0].started, 10)
    found = supervisor.find("vllm-2")
    assert found is not None
    placement.places["vllm-2"][0].now = ProgramState(exit_code=0)
    assert supervisor.failed() == []
    assert found.exit_code == 0, "it has drained"
    supervisor.stop("vllm-2")
    supervisor.vacate("vllm-2")
    assert supervisor.find("vllm-2") is None
    assert (placement.free, "vllm-2" in placement.places) == (1, False)


class Crowded(FakePlacement):
    """A placement on a cluster that has room only once others have left it."""

    def __init__(self, free: int) -> None:
        super().__init__(free)
        self.has_room = threading.Event()
        self.has_room.set()
        self.asked = 0

    def place(self, roles: Sequence[Role]) -> Places:
        self.asked += 1
        self.has_room.wait()
        return super().place(roles)


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[SeatedSupervisor, Crowded]]:
    """A cluster on which the first server has its place; a second one was stopped while it waited for a place."""
    placement = Crowded(free=2)
    with SeatedSupervisor(tmp_path, placement) as supervisor:
        supervisor.place([SERVER], lambda: None)
        placement.has_room.clear()
        supervisor.start(spec("vllm-2"))
        supervisor.stop("vllm-2")
        supervisor.vacate("vllm-2")
        yield supervisor, placement
        placement.has_room.set()


def test_a_place_that_is_found_once_its_program_was_stopped_is_given_back(
    crowded: tuple[SeatedSupervisor, Crowded],
) -> None:
    supervisor, placement = crowded
    placement.has_room.set()
    assert wait_until(lambda: placement.free == 0, 10)
    assert wait_until(lambda: not supervisor.failed() and placement.free == 1, 10)
    assert "vllm-2" not in placement.places


def test_a_program_that_is_started_again_takes_the_place_that_was_asked_for_before(
    crowded: tuple[SeatedSupervisor, Crowded],
) -> None:
    """A second request would be given back in the name of the first, with the program in it."""
    supervisor, placement = crowded
    program = supervisor.start(spec("vllm-2"))
    placement.has_room.set()
    assert wait_until(lambda: not supervisor.failed() and "vllm-2" in placement.places, 10)
    assert wait_until(lambda: not supervisor.failed() and bool(program.seats), 10)
    assert (placement.asked, placement.free) == (2, 0)
    assert [len(seat.started) for seat in placement.places["vllm-2"]] == [1]


def test_what_has_no_role_runs_here_and_the_end_stops_every_seat(tmp_path: Path) -> None:
    placement = FakePlacement(free=1)
    with SeatedSupervisor(tmp_path, placement) as supervisor:
        supervisor.place([SERVER], lambda: None)
        supervisor.start(spec("vllm"))
        (seat,) = placement.places["vllm"]
        here = supervisor.start(
            ChildSpec(name="broker", command=(sys.executable, "-c", "import time; time.sleep(600)"))
        )
        assert here.exit_code is None
        assert "broker" in supervisor
        assert "vllm" in supervisor
    assert seat.stops == 1
    assert placement.is_closed


def test_a_run_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    with (
        SeatedSupervisor(tmp_path, FakePlacement(free=2)) as supervisor,
        pytest.raises(PlacementFailed, match="wanted 3, free 2"),
    ):
        supervisor.place([SERVER, TRAINER], lambda: None)
    with SeatedSupervisor(tmp_path, LocalPlacement()) as supervisor, pytest.raises(PlacementFailed, match="no seats"):
        supervisor.place([SERVER], lambda: None)


class Unanswered(FakePlacement):
    """A placement on a cluster that does not answer."""

    def __init__(self) -> None:
        super().__init__(free=0)
        self.closed = threading.Event()
        self.has_ended = False

    def place(self, roles: Sequence[Role]) -> Places:
        self.closed.wait()
        return super().place(roles)

    def lost(self) -> Mapping[str, str]:
        if self.has_ended:
            raise ChildFailed("the head does not answer any more", exit_code=1)
        return super().lost()

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_wait_for_places_ends_by_a_signal_or_with_the_cluster_although_its_call_hangs(
    tmp_path: Path, has_ended: bool
) -> None:
    placement, calls = Unanswered(), itertools.count()

    def on_wait() -> None:
        if next(calls):
            placement.has_ended = has_ended
            if not has_ended:
                raise KeyboardInterrupt

    raised = pytest.raises(ChildFailed if has_ended else KeyboardInterrupt)
    with raised, SeatedSupervisor(tmp_path, placement) as supervisor:
        supervisor.place([SERVER], on_wait)


def test_a_launch_without_roles_does_not_wait_for_places(tmp_path: Path) -> None:
    with SeatedSupervisor(tmp_path, Unanswered()) as supervisor:
        supervisor.place([], lambda: pytest.fail("it waited"))


def test_the_code_inside_a_seat_runs_a_program_in_the_launcher_s_folder_without_the_variables_of_the_job_around_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("example_trainer.processes.child.usable_cores", lambda: 64)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir("/")
    host = SeatHost(tmp_path, hides_gpus=True, directory=tmp_path)
    names = "sorted({'SLURM_PROCID', 'OMP_NUM_THREADS'} & {*os.environ})"
    code = f"import os; print({names}, os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd())"
    try:
        host.start(ChildSpec(name="vllm", command=(sys.executable, "-c", code), ends_by_itself=True))
        assert wait_until(lambda: host.state().exit_code == 0, 20)
        assert (tmp_path / "vllm.log").read_text() == f"[]  {tmp_path}\n"
        host.stop(1.0)
        assert host.state() == ProgramState()
        host.start(ChildSpec(name="vllm", command=(sys.executable, "-c", "raise SystemExit(3)")))
        assert wait_until(lambda: host.state().exit_code == 3, 20)
    finally:
        host.stop(1.0)
        host.close()
    assert "SLURM_PROCID" not in os.environ


@pytest.mark.parametrize(
    ("cores", "passed", "threads"), [(2, {}, "1"), (64, {}, "None"), (2, {"OMP_NUM_THREADS": "4"}, "4")]
)
def test_the_cores_of_a_program_s_own_node_decide_its_threads(
    tmp_path: Path, monkeypatch, cores: int, passed: dict[str, str], threads: str
) -> None:
    """Those of the launcher's node did: from a small one, trainers on large nodes got one thread each."""
    monkeypatch.setattr("example_trainer.processes.child.usable_cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # as Ray sets it
    host = SeatHost(tmp_path, hides_gpus=False, directory=tmp_path)
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    try:
        host.start(
            ChildSpec(name="vllm", command=(sys.executable, "-c", code), environment=passed, ends_by_itself=True)
        )
        assert wait_until(lambda: host.state().exit_code == 0, 20)
        assert (tmp_path / "vllm.log").read_text() == f"{threads}\n"
    finally:
        host.stop(1.0)
        host.close()


def test_the_guardian_of_a_seat_is_not_a_child_of_it_and_cleans_up_once_the_seat_is_gone(tmp_path: Path) -> None:
    """Ray kills every child of a process that ends, as the first thing after it."""
    before = set(psutil.Process().children())
    guardian = Guardian(mark="a-mark-of-this-test", temporary_dir=str(tmp_path), detached=True)
    assert set(psutil.Process().children()) == before
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    marked = subprocess.Popen([sys.executable, "-c", stubborn], env={MARK_VARIABLE: "a-mark-of-this-test"})
    assert guardian._process.stdin is not None
    guardian._process.stdin.close()
    assert marked.wait(30) < 0
    assert wait_until(lambda: not tmp_path.exists(), 20)
