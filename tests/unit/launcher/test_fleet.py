"""The launcher's inference servers follow the number that is asked for at the broker, over real programs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from example_trainer.launcher.fleet_plan import FleetRecord, limits_of
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.tree import wait_until

from .fleet_scene import FAILS, FLAGS, WAITS, Scene, end, planned


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
        limits = limits_of(settings, os.environ)
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
    assert reason in limits_of(settings, os.environ).fixed


def test_gpus_limit_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.serves_from_gpu", lambda _: True)
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.count_gpus", lambda _: 8)
    on_one = planned(tmp_path / "a", *FLAGS, "--num-inference-nodes", "3")[0]
    limits = limits_of(on_one, {})
    assert (limits.least, limits.most) == (1, 3)
    assert "divide the memory of the trainer's GPU by --num-inference-nodes 3" in limits.limit
    own = planned(tmp_path / "b", *FLAGS, "--vllm-gpu", "1", "--vllm-tensor-parallel-size", "2")[0]
    assert (limits_of(own, {}).most, limits_of(own, {}).limit[:30]) == (3, "of 8 GPUs those from --vllm-gp")


def test_gpus_of_trainer_and_teacher_are_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.serves_from_gpu", lambda _: True)
    monkeypatch.setattr("example_trainer.launcher.fleet_plan.count_gpus", lambda _: 8)
    distilled = ("--env.server", "distill_server.py", "--distill", "forward_kl", "--teacher.model_name", "org/teacher")
    on_two = ("--vllm-gpu", "1", "--vllm-tensor-parallel-size", "2")

    def most(*flags: str) -> int:
        made = planned(tmp_path / str(len(list(tmp_path.iterdir()))), *FLAGS, *on_two, *distilled, *flags)[0]
        return limits_of(made, {}).most

    assert most("--teacher.gpu", "6") == 2, "of 1,2 3,4 5,6"
    assert most("--teacher.gpu", "0") == 3
    assert most("--teacher.gpu", "2") == 3, "the first server, which is planned, shares it"
    assert most("--teacher.gpu", "0", "--device", "cuda:3") == 1
