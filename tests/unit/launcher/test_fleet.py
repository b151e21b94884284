"""The launcher's inference servers follow the number that is asked for at the broker, over real programs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atropos_api.broker.fleets import Fleets
from atropos_api.broker.inference_servers import InferenceServers
from atropos_api.client import BrokerUnreachable
from atropos_api.wire import FleetLease, FleetReport, InferenceServer, ServerReport, ServerSet
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.fleet import REPORT_SECONDS, Fleet
from example_trainer.launcher.fleet_plan import FleetRecord, limits_of
from example_trainer.launcher.placement.roles import Role
from example_trainer.launcher.placement.seated_supervisor import SeatedSupervisor
from example_trainer.launcher.placement.testing import FakePlacement
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.restarts import RestartBudget, Restarts
from example_trainer.launcher.run_dir import RunDir, plan_run_dir
from example_trainer.launcher.run_file import RunSettings, read_settings
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.processes.tree import wait_until

FLAGS = ("--registered-servers", "--weight-bridge-mode", "lora_only", "--env.server", __file__)
WAITS = "import time; time.sleep(600)"
FAILS = "raise SystemExit('ValueError: no memory')"


class Broker:
    """The broker's own registry and fleets, without HTTP; `reachable` is false while nothing answers."""

    def __init__(self, clock) -> None:
        self.servers = InferenceServers(clock, lease_seconds=1000.0, first_epoch=1)
        self.fleets = Fleets(clock)
        self.reachable = True

    def renew_fleet(self, fleet_id: str, report: FleetReport) -> FleetLease:
        self._check()
        return self.fleets.renew(fleet_id, report)

    def remove_fleet(self, fleet_id: str, *, launcher_id: str) -> None:
        self._check()
        self.fleets.remove(fleet_id, launcher_id)

    def get_servers(self, policy: str | None = None) -> ServerSet:
        self._check()
        return self.servers.select(policy)

    def drain_server(self, server_id: str) -> InferenceServer:
        self._check()
        return self.servers.drain(server_id)

    def remove_server(self, server_id: str) -> None:
        self._check()
        self.servers.remove(server_id)

    def close(self) -> None: ...

    def _check(self) -> None:
        if not self.reachable:
            raise BrokerUnreachable("nothing answers")


class Scene:
    """A fleet of a run directory, with sleeping programs in place of its servers."""

    def __init__(self, tmp_path: Path, supervisor: Supervisor, *flags: str, most: int | None = None) -> None:
        self.now = 0.0
        self.broker = Broker(lambda: self.now)
        self.run_dir, self.supervisor, self.flags = tmp_path / "run", supervisor, flags
        self.restarts = Restarts(supervisor, RestartBudget(restarts=3, window_seconds=100.0), clock=lambda: self.now)
        self.code, self.most = WAITS, most
        self.launch()

    def launch(self, *more: str) -> None:
        """Start the launcher's part, as `Launch` does."""
        self.settings, self.run, self.plan = planned(self.run_dir, *FLAGS, *self.flags, *more)
        self.run.create()
        limits = limits_of(self.settings.trainer, os.environ)
        limits = replace(limits, most=self.most or limits.most)
        resumes = self.settings.trainer.resume is not None
        self.fleet = Fleet(
            self._with_programs(self.plan),
            limits,
            FleetRecord.read(self.run, limits, resumes=resumes),
            settings=self.settings,
            run=self.run,
            supervisor=self.supervisor,
            broker=self.broker,
            clock=lambda: self.now,
        )
        for spec in self.fleet.first_plan().children:
            if spec.name in self.fleet.names:
                self.supervisor.start(spec)

    def _with_programs(self, plan: Plan) -> Plan:
        program = (sys.executable, "-c")
        children = tuple(replace(spec, command=(*program, WAITS)) for spec in plan.children)
        assert plan.add_server is not None
        add = plan.add_server

        def added(index, port):
            spec, files = add(index, port)
            return replace(spec, command=(*program, self.code)), files

        return replace(plan, children=children, add_server=added)

    def poll(self, *, ready: bool = True) -> list[str]:
        self.now += REPORT_SECONDS
        return self.fleet.poll(self.restarts, ready=ready)

    def scale(self, wanted: int) -> list[str]:
        """Ask for a number, and return what the launcher did about it."""
        self.broker.fleets.scale(self.run.fleet_id, wanted)
        return [*self.poll(), *self.poll()]

    def server_id(self, name: str) -> str:
        return f"{self.run.fleet_id}.{name}"

    def register(self, *names: str, ready: bool = True) -> None:
        for name in names:
            boot_id = self.boot_id(name)
            report = ServerReport(
                lease_id=f"lease-{name}-{boot_id}", boot_id=boot_id, mode="adapters", port=9, ready=ready
            )
            self.broker.servers.renew(self.server_id(name), report, "127.0.0.1")

    def prove(self, *names: str) -> None:
        """Have servers serve, as after a publish."""
        self.broker.servers.prove("default", [f"lease-{name}-{self.boot_id(name)}" for name in names])

    def boot_id(self, name: str) -> str:
        """Return what tells a server's process from the one before it."""
        return str(self.supervisor[name].started_at)

    def state_of(self, name: str) -> str:
        return {row.server_id: row.state for row in self.broker.get_servers().servers}[self.server_id(name)]

    def note_failures(self) -> list[str]:
        """Give up or plan to restart what has failed, as `Launch` does."""
        failures = self.restarts.judge_failures((), apart=self.fleet.unsettled)
        given_up = {found.name: line for found in failures if (line := self.fleet.give_up(found, self.restarts))}
        return [*given_up.values(), *self.restarts.plan([found for found in failures if found.name not in given_up])]

    def due(self) -> list[tuple[ChildSpec, int]]:
        """Return what is started again after the next pause."""
        self.now += 10.0
        return self.restarts.due()

    def leave(self, name: str) -> None:
        """End a server's program with exit code 0, as after its last request."""
        end(self.supervisor, name)

    @property
    def running(self) -> set[str]:
        return {child.name for child in self.supervisor if child.exit_code is None}

    @property
    def seen(self):
        return self.broker.fleets.describe(self.run.fleet_id)


def planned(run_dir: Path, *argv: str) -> tuple[RunSettings, RunDir, Plan]:
    settings = read_settings(["--model-name", "some/model", "--run-dir", str(run_dir), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=settings.trainer.resume is not None)
    return settings, run, make_plan(settings, run, settle_endpoints(settings), model="some/model")


def end(supervisor: Supervisor, name: str) -> None:
    """Replace a program by one that exits with code 0."""
    spec = supervisor[name].spec
    supervisor.stop(name, grace_seconds=0)
    child = supervisor.start(replace(spec, command=(sys.executable, "-c", "")))
    assert wait_until(lambda: child.exit_code is not None, 20)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path) as supervisor:
        yield supervisor


@pytest.fixture
def scene(tmp_path: Path, supervisor: Supervisor) -> Iterator[Scene]:
    scene = Scene(tmp_path, supervisor)
    scene.poll()
    scene.register("vllm")
    yield scene
    scene.fleet.close()


def test_servers_are_added_with_ids_ports_and_settings_of_their_own(scene: Scene) -> None:
    assert scene.scale(3) == ["3 inference servers are wanted", "vllm-2 starts", "vllm-3 starts"]
    assert scene.running == {"vllm", "vllm-2", "vllm-3"}
    assert (scene.seen.wanted, scene.seen.running, scene.seen.followed) == (3, 3, True)
    configs = {name: (scene.run.configs / f"{name}.yaml").read_text() for name in ("vllm-2", "vllm-3")}
    for name, text in configs.items():
        assert f"server_id: {scene.server_id(name)}" in text
    assert len({line for text in configs.values() for line in text.splitlines() if "port:" in line}) == 2


def test_the_newest_servers_drain_first_and_are_forgotten_when_they_have_ended(scene: Scene) -> None:
    scene.scale(3)
    scene.register("vllm-2", "vllm-3")
    assert scene.scale(1) == ["1 inference servers are wanted", "vllm-3 drains", "vllm-2 drains"]
    assert scene.running == {"vllm", "vllm-2", "vllm-3"}, "they end their requests"
    assert {row.state for row in scene.broker.get_servers().servers} == {"joining", "draining"}
    assert scene.seen.running == 1
    scene.leave("vllm-3")
    assert scene.poll() == ["vllm-3 has left"]
    os.kill(scene.supervisor["vllm-2"].process.pid, signal.SIGKILL)
    assert wait_until(lambda: scene.supervisor["vllm-2"].exit_code is not None, 20)
    assert scene.note_failures() == [], "it was told to end"
    (line,) = scene.poll()
    assert line.startswith("vllm-2 has left: it was killed by SIGKILL")
    assert {child.name for child in scene.supervisor} == {"vllm"}
    assert scene.scale(2)[1:] == ["vllm-2 starts"]


def test_a_server_that_is_drained_from_outside_is_not_replaced(scene: Scene) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    scene.broker.servers.drain(scene.server_id("vllm"))
    assert scene.poll() == ["vllm drains"]
    scene.leave("vllm")
    assert scene.poll() == ["vllm has left"]
    scene.poll()
    assert scene.running == {"vllm-2"}
    assert (scene.seen.wanted, scene.seen.running) == (1, 1)
    assert json.loads(scene.run.fleet_record.read_text())["wanted"] == 1


def test_the_last_server_is_replaced_when_it_is_drained_from_outside(scene: Scene) -> None:
    scene.broker.servers.drain(scene.server_id("vllm"))  # as after a SIGTERM to its process
    assert scene.poll() == ["vllm drains; it was the last one, and another takes its place", "vllm-2 starts"]
    scene.leave("vllm")
    assert scene.poll() == ["vllm has left"]
    assert (scene.running, scene.seen.wanted) == ({"vllm-2"}, 1)
    os.kill(scene.supervisor["vllm-2"].process.pid, signal.SIGKILL)
    assert wait_until(lambda: scene.supervisor["vllm-2"].exit_code is not None, 20)
    (line,) = scene.note_failures()
    assert "restart 1 of 3" in line, "the run cannot go on without it"
    for spec, restarted in scene.due():
        scene.supervisor.start(spec, restarted=restarted)
    scene.leave("vllm-2")
    assert scene.poll() == ["vllm-2 has left; it was the last one, and another takes its place", "vllm starts"]


def test_the_last_server_is_replaced_only_once_it_has_left_where_there_is_no_room_for_two(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    scene = Scene(tmp_path, supervisor, most=1)
    scene.poll()
    scene.register("vllm")
    scene.broker.servers.drain(scene.server_id("vllm"))
    assert scene.poll() == ["vllm drains; it was the last one, and another takes its place"]
    assert (scene.poll(), scene.running) == ([], {"vllm"})
    scene.leave("vllm")
    assert scene.poll() == ["vllm has left", "vllm starts"]
    scene.fleet.close()


def test_an_added_server_that_fails_at_its_start_lowers_the_number_and_ends_nothing(scene: Scene) -> None:
    scene.code = FAILS
    scene.scale(2)
    assert wait_until(lambda: scene.supervisor["vllm-2"].exit_code is not None, 20)
    assert scene.note_failures() == []
    (line,) = scene.poll()
    assert line.startswith("vllm-2 did not start: it exited with code 1")
    scene.poll()
    assert (scene.seen.wanted, scene.seen.running, scene.seen.note) == (1, 1, line)
    scene.code = WAITS
    scene.scale(2)
    assert (scene.seen.running, scene.seen.note) == (2, ""), "the note was about the earlier request"


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[tuple[Scene, FakePlacement]]:
    """A fleet on a cluster that has room for two servers."""
    placement = FakePlacement(free=2)
    with SeatedSupervisor(tmp_path, placement) as supervisor:
        supervisor.place([Role(name="vllm")], lambda: None)
        scene = Scene(tmp_path, supervisor)
        scene.poll()
        scene.register("vllm")
        yield scene, placement
        scene.fleet.close()


def test_an_added_server_that_finds_no_place_lowers_the_number_and_says_why(
    placed: tuple[Scene, FakePlacement],
) -> None:
    scene, _ = placed
    assert scene.scale(3)[1:] == ["vllm-2 starts", "vllm-3 starts"]
    assert wait_until(lambda: any(child.loss for child in scene.supervisor.failed()), 10)
    assert scene.note_failures() == []
    (line,) = scene.poll()
    assert line.startswith("vllm-3 did not start: it lost its place: wanted 1, free 0")
    scene.poll()
    assert (scene.seen.wanted, scene.seen.running, scene.seen.note) == (2, 2, line)


def test_a_server_whose_node_is_lost_while_it_drains_has_left(placed: tuple[Scene, FakePlacement]) -> None:
    scene, placement = placed
    scene.scale(2)
    assert wait_until(lambda: not scene.supervisor.failed() and bool(scene.supervisor["vllm-2"].seats), 10)
    scene.register("vllm-2")
    assert scene.scale(1)[1:] == ["vllm-2 drains"]
    (seat,) = placement.places["vllm-2"]
    placement.losses[seat.name] = "its node has died"
    assert scene.note_failures() == []
    (line,) = scene.poll()
    assert line.startswith(f"vllm-2 has left: it lost its seat on {seat.address} (its node has died)")
    assert scene.fleet.names == ["vllm"]


def test_a_server_that_is_stopped_for_good_gives_its_place_back(placed: tuple[Scene, FakePlacement]) -> None:
    scene, placement = placed
    scene.scale(2)
    assert wait_until(lambda: not scene.supervisor.failed() and bool(scene.supervisor["vllm-2"].seats), 10)
    scene.register("vllm-2", ready=False)
    assert scene.scale(1)[1:] == ["vllm-2 is stopped before it has served"]
    assert (placement.free, "vllm-2" in placement.places) == (1, False)


def test_a_server_that_has_answered_once_is_restarted_as_any_other(scene: Scene) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    scene.poll()
    assert scene.fleet.unsettled == set()
    os.kill(scene.supervisor["vllm-2"].process.pid, signal.SIGKILL)
    assert wait_until(lambda: scene.supervisor["vllm-2"].exit_code is not None, 20)
    (line,) = scene.note_failures()
    assert "restart 1 of 3" in line
    assert scene.scale(1)[1:] == ["vllm-2 is not started again"], "its pause is not over"
    scene.now += 100
    assert scene.restarts.due() == []


def test_the_failures_of_a_server_that_has_left_do_not_count_for_the_next_of_its_name(scene: Scene) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    scene.poll()
    kill(scene, "vllm-2")
    start_due(scene)
    scene.leave("vllm-2")
    assert scene.poll() == ["vllm-2 has left"]
    assert scene.scale(2)[1:] == ["vllm-2 starts"]
    scene.register("vllm-2")
    scene.poll()
    kill(scene, "vllm-2")


def kill(scene: Scene, name: str) -> None:
    """Kill a server's program, and have the launcher note its first failure."""
    os.kill(scene.supervisor[name].process.pid, signal.SIGKILL)
    assert wait_until(lambda: scene.supervisor[name].exit_code is not None, 20)
    (line,) = scene.note_failures()
    assert "restart 1 of 3" in line


def start_due(scene: Scene) -> None:
    ((spec, restarted),) = scene.due()
    scene.supervisor.start(spec, restarted=restarted)


def test_a_server_that_is_drained_while_it_waits_for_its_restart_is_not_started_again(scene: Scene) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    scene.poll()
    kill(scene, "vllm-2")
    scene.broker.servers.drain(scene.server_id("vllm-2"))  # the broker knows the killed process, whose lease goes on
    assert scene.poll() == ["vllm-2 drains", "vllm-2 is not started again"]
    assert scene.due() == []
    scene.poll()
    assert (scene.fleet.names, scene.seen.wanted) == (["vllm"], 1)


@pytest.mark.parametrize("told_by", ["scale", "drain"])
def test_a_restarted_server_leaves_although_the_broker_told_the_process_before_it(scene: Scene, told_by: str) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    scene.poll()
    kill(scene, "vllm-2")
    start_due(scene)
    if told_by == "scale":
        scene.broker.fleets.scale(scene.run.fleet_id, 1)
    else:
        scene.broker.servers.drain(scene.server_id("vllm-2"))
    assert "vllm-2 drains" in [*scene.poll(), *scene.poll()]
    scene.broker.servers.remove(scene.server_id("vllm-2"))  # the lease of the killed process ends
    scene.register("vllm-2", ready=False)
    assert scene.poll() == ["vllm-2 is stopped before it has served"]
    assert (scene.running, scene.seen.wanted) == ({"vllm"}, 1)


def test_a_server_is_told_again_to_drain_by_a_broker_that_has_forgotten_it(scene: Scene) -> None:
    scene.scale(2)
    scene.register("vllm-2")
    assert scene.scale(1)[1:] == ["vllm-2 drains"]
    scene.broker = scene.fleet._broker = Broker(lambda: scene.now)  # killed before the server had its answer
    scene.register("vllm", "vllm-2")
    assert scene.poll() == []
    assert scene.state_of("vllm-2") == "draining"


def test_a_server_that_no_restart_mends_is_given_up_only_while_another_one_serves(scene: Scene) -> None:
    def fail(name: str) -> list[str]:
        os.kill(scene.supervisor[name].process.pid, signal.SIGKILL)
        assert wait_until(lambda: scene.supervisor[name].exit_code is not None, 20)
        lines = scene.note_failures()
        for spec, restarted in scene.due():
            scene.supervisor.start(spec, restarted=restarted)
        return lines

    scene.scale(2)
    scene.register("vllm", "vllm-2")
    scene.poll()
    scene.prove("vllm", "vllm-2")  # after the launcher's last look
    for _ in range(3):
        assert "restart" in fail("vllm-2")[0]
    (line,) = fail("vllm-2")
    assert line.startswith("vllm-2 is given up, and the run goes on with the other servers: it was killed by SIGKILL")
    assert "it has failed 4 times within 100 s, and --max-restarts is 3" in line
    assert scene.poll() == []
    assert (scene.seen.wanted, scene.seen.running, scene.seen.note) == (1, 1, line)
    assert scene.running == {"vllm"}
    assert {row.server_id: row.state for row in scene.broker.get_servers().servers}[scene.server_id("vllm-2")] == "gone"
    assert scene.scale(2)[1:] == ["vllm-2 starts"], "somebody has mended it"
    for _ in range(3):
        assert "restart" in fail("vllm")[0]
    with pytest.raises(ChildFailed, match="vllm was killed by SIGKILL"):
        fail("vllm")


def test_a_server_that_loads_is_stopped_and_one_that_nobody_knows_only_once_all_are_known(scene: Scene) -> None:
    scene.scale(3)
    scene.register("vllm-2", ready=False)
    assert scene.scale(1)[1:] == ["vllm-2 is stopped before it has served"]
    assert "vllm-3" in scene.running, "the broker has just begun, so it may serve"
    scene.now += 1000
    assert scene.poll() == ["vllm-3 is stopped before it has served"]


def test_nothing_is_changed_before_the_first_servers_are_ready_or_without_a_broker(scene: Scene) -> None:
    scene.broker.fleets.scale(scene.run.fleet_id, 2)
    assert scene.poll(ready=False) == ["2 inference servers are wanted"]
    scene.broker.reachable = False
    assert scene.poll() == []
    scene.broker.reachable = True
    assert scene.poll() == ["vllm-2 starts"]


def test_a_resumed_run_has_as_many_servers_as_were_asked_for_last(tmp_path: Path, supervisor: Supervisor) -> None:
    scene = Scene(tmp_path, supervisor, "--num-inference-nodes", "2")
    scene.poll()
    scene.register("vllm", "vllm-2")
    scene.scale(1)
    scene.leave("vllm-2")
    scene.poll()
    scene.fleet.close()
    assert scene.broker.fleets.select().fleets == []
    supervisor.stop("vllm")
    scene.broker.servers.remove(scene.server_id("vllm"))
    scene.launch("--resume", "auto")
    assert scene.running == {"vllm"}
    assert scene.fleet.first_plan().endpoints.vllm_ports == scene.plan.endpoints.vllm_ports[:1]
    command = ("python", "-m", "trainer", "--config", "trainer.yaml", "--resume", "auto")
    told = scene.fleet.for_trainer(command)
    assert told == ("python", "-m", "trainer", "--num-inference-nodes", "1", *command[3:]), "it awaits no second one"
    scene.poll()
    scene.register("vllm")
    assert scene.scale(2)[1:] == ["vllm-2 starts"]
    assert scene.fleet.for_trainer(told) == command
    scene.fleet.close()
    for flags in (("--num-inference-nodes", "3"), ("--num-inference-nodes", "2", "--resume", "none")):
        settings = planned(scene.run_dir, *FLAGS, *flags)[0]
        limits = limits_of(settings.trainer, os.environ)
        found = FleetRecord.read(scene.run, limits, resumes="--resume" not in flags)
        assert found.wanted == limits.planned, "another setting than before, or another run"


def test_servers_whose_number_is_fixed_are_reported_and_left_alone(tmp_path: Path, supervisor: Supervisor) -> None:
    scene = Scene(tmp_path, supervisor, "--no-registered-servers", "--num-inference-nodes", "0")
    scene.poll()
    assert (scene.seen.running, scene.seen.wanted, scene.seen.most) == (1, 1, 1)
    assert "addresses: start the run with --registered-servers" in scene.seen.fixed
    end(supervisor, "vllm")
    assert scene.poll() == []
    (failure,) = scene.note_failures()
    assert failure.startswith("vllm exited with code 0"), "no request had asked for it"
    scene.fleet.close()


def test_runs_of_equal_names_at_one_broker_have_servers_of_different_ids(tmp_path: Path) -> None:
    runs = [planned(tmp_path / parent / "run", *FLAGS) for parent in ("a", "b")]
    ids = [made.settings_of("vllm")["vllm"]["server_id"] for _, _, made in runs]
    assert len({run.fleet_id for _, run, _ in runs}) == len(set(ids)) == 2
    assert all(name.startswith("run-") and name.endswith(".vllm") for name in ids)
    _, _, named = planned(tmp_path / "c", *FLAGS, "--num-inference-nodes", "2", "--vllm.server-id", "gpu")
    assert [named.settings_of(name)["vllm"]["server_id"] for name in named.servers] == ["gpu", "gpu-2"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--weight-bridge-mode", "lora_restart"), "--weight-bridge-mode lora_only --registered-servers"),
        (("--weight-bridge-mode", "none"), "--registered-servers --restart-method reload"),
        (("--weight-bridge-mode", "shared_vllm"), "by broadcast: start the run with --registered-servers"),
        (("--weight-bridge-mode", "lora_only"), "addresses: start the run with --registered-servers"),
        (("--registered-servers", "--start-vllm", "never"), "atropos drain"),
    ],
)
def test_where_the_number_is_fixed_the_reason_names_what_to_do(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    settings, _, _ = planned(tmp_path / "run", "--env.server", __file__, *flags)
    assert reason in limits_of(settings.trainer, os.environ).fixed


def test_gpus_limit_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.serves_from_gpu", lambda _: True)
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.count_gpus", lambda _: 8)
    on_one = planned(tmp_path / "a", *FLAGS, "--num-inference-nodes", "3")[0].trainer
    limits = limits_of(on_one, {})
    assert (limits.least, limits.most) == (1, 3)
    assert "divide the memory of the trainer's GPU by --num-inference-nodes 3" in limits.limit
    own = planned(tmp_path / "b", *FLAGS, "--vllm-gpu", "1", "--vllm-tensor-parallel-size", "2")[0].trainer
    assert (limits_of(own, {}).most, limits_of(own, {}).limit[:30]) == (3, "of 8 GPUs those from --vllm-gp")
