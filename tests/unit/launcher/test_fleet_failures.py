"""A server that fails, finds no place or loses its node: what is started again, what is given up, and what leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.launcher.placement.roles import Role
from example_trainer.launcher.placement.seated_supervisor import SeatedSupervisor
from example_trainer.launcher.placement.testing import FakePlacement
from example_trainer.processes.child import ChildFailed
from example_trainer.processes.tree import wait_until

from .fleet_scene import Broker, Scene, kill, start_due


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
