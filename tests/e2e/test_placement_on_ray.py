"""Placement on a Ray cluster: a head and three nodes on this machine, real raylets, stand-ins for the programs.

`test_runs_on_ray` has the real programs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_api.client import BrokerClient
from atropos_api.common.secrets import TokenSource
from example_trainer.commands.scaling import scale
from example_trainer.processes.tree import is_alive, wait_until

from .conftest import Launched
from .ray_cluster import GONE_SECONDS, REPLACED_SECONDS, RayNodes, programs, remains, steps_of
from .traffic import Traffic

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="could not import ray, which is not locked"),
]

HEADLESS_SECONDS = 45.0
"""Time in which a launch without its head ends: six seconds until it notices, the rest to end what is not reached. Ray
itself would end it without a word after a minute.
"""
FLAGS = (
    *("--registered-servers", "--weight-bridge-mode", "lora_only", "--num-inference-nodes", "2"),
    *("--placement", "ray", "--placement-timeout", "20"),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with contextlib.closing(RayNodes()) as cluster:
        yield cluster


@pytest.fixture
def start(standins: Callable[..., Launched], nodes: RayNodes) -> Callable[..., Launched]:
    """The launcher over stand-ins, with its programs on the cluster."""

    def start(*flags: str, **variables: Any) -> Launched:
        return standins(*FLAGS, "--placement-address", nodes.address, *flags, **variables)

    return start


def broker_of(launched: Launched) -> str:
    """Return the address of a run's broker."""
    return str(yaml.safe_load((launched.run_dir / "configs/vllm.yaml").read_text())["vllm"]["broker_url"])


def test_a_run_trains_on_the_nodes_and_gives_everything_back(start, nodes: RayNodes) -> None:
    launched = start("--training-steps", "300")
    launched.wait_for_steps(3)
    found = programs(launched)
    assert {program.nice() for program in found.values()} == {0}, "Ray's own processes run at niceness 15"
    assert set(found) == {"api", "vllm", "vllm-2", "environment", "trainer"}
    for name in ("vllm", "vllm-2", "environment", "trainer"):
        assert nodes.raylet_of(found[name]) in nodes.raylets
    code, out, error = launched.end()
    assert (code, error) == (0, ""), launched.logs()
    assert "vllm ready" in out
    assert steps_of(launched) == list(range(1, 301))
    record = json.loads((launched.run_dir / "config.json").read_text())
    assert sorted(name.partition(".")[0] for name in record["placement"]["seats"]) == [
        "environment", "trainer", "vllm", "vllm-2",
    ]  # fmt: skip
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
    assert wait_until(lambda: nodes.free_gpus() == 6.0, GONE_SECONDS)


def test_runs_in_directories_of_one_name_are_on_the_cluster_at_once(start, tmp_path: Path) -> None:
    runs = [start("--training-steps", "100", run_dir=tmp_path / place / "run") for place in ("a", "b")]
    for launched in runs:
        code, _, error = launched.end(120)
        assert (code, error) == (0, ""), launched.logs()


@pytest.mark.parametrize("name", ["vllm-2", "trainer", "environment"])
def test_kill_9_of_a_node_has_its_programs_started_elsewhere_and_no_step_is_missing(start, nodes, name: str) -> None:
    launched = start("--training-steps", "2000")
    launched.wait_for_steps(3)
    before = programs(launched)
    raylet = nodes.raylet_of(before[name])
    lost = [other for other in before if other != "api" and nodes.raylet_of(before[other]) == raylet]
    raylet.kill()
    try:

        def replaced() -> bool:
            assert launched.process.poll() is None, launched.process.communicate()
            now = programs(launched)
            return all(other in now and now[other] != before[other] for other in lost)

        assert wait_until(replaced, REPLACED_SECONDS), launched.logs()
        assert not any(is_alive(before[other]) for other in lost)
        steps = launched.steps()
        assert wait_until(lambda: launched.steps() > steps + 10, REPLACED_SECONDS), launched.logs()
    finally:
        nodes.replace(raylet)
        launched.process.send_signal(signal.SIGTERM)
    code, out, _ = launched.end()
    assert code == 143
    assert f"{name} lost its seat on" in out
    assert "restart 1 of 5" in out
    assert steps_of(launched) == list(range(1, len(steps_of(launched)) + 1))
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


def test_kill_9_of_a_server_s_node_under_load_has_it_out_of_every_pool_within_its_lease_and_no_request_fails(
    start, nodes
) -> None:
    lease_seconds, token = 5.0, "a-token-of-this-test"
    launched = start("--training-steps", "8000", "--api.server_lease", str(lease_seconds), ATROPOS_TOKEN=token)
    launched.wait_for_steps(3)
    with BrokerClient(broker_of(launched), token=TokenSource(token)) as broker:

        def serving() -> dict[str, str]:
            assert launched.process.poll() is None, launched.process.communicate()
            return {
                row.server_id.rpartition(".")[2]: row.url
                for row in broker.get_servers().servers
                if row.state == "serving"
            }

        # For a lease after its start the broker's set is not complete, and a server that is missing is not taken out.
        known = wait_until(lambda: len(serving()) == 2 and broker.get_servers().complete, REPLACED_SECONDS)
        assert known, launched.logs()
        before = serving()
        raylet = nodes.raylet_of(programs(launched)["vllm-2"])
        with Traffic(broker_of(launched), token) as traffic:
            assert wait_until(lambda: traffic.asks(before["vllm-2"]) and traffic.tokens > 0, REPLACED_SECONDS)
            raylet.kill()
            try:
                assert wait_until(lambda: not traffic.asks(before["vllm-2"]), lease_seconds + 2)
                assert wait_until(
                    lambda: serving().get("vllm-2", before["vllm-2"]) != before["vllm-2"], REPLACED_SECONDS
                )
                assert wait_until(lambda: traffic.asks(serving()["vllm-2"]), lease_seconds), (
                    "the new one takes its part"
                )
            finally:
                nodes.replace(raylet)
        assert traffic.failures == []
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


def test_a_server_that_is_added_runs_on_a_node_and_one_that_has_drained_gives_its_place_back(start, nodes) -> None:
    token = "a-token-of-this-test"
    launched = start("--training-steps", "4000", ATROPOS_TOKEN=token)
    launched.wait_for_steps(3)
    with BrokerClient(broker_of(launched), token=TokenSource(token)) as broker:

        def are_serving(count: int) -> bool:
            assert launched.process.poll() is None, launched.process.communicate()
            return len([row for row in broker.get_servers().servers if row.state == "serving"]) == count

        assert wait_until(lambda: are_serving(2), REPLACED_SECONDS), launched.logs()
        scale(broker, 3, wait_seconds=REPLACED_SECONDS)
        assert wait_until(lambda: are_serving(3), REPLACED_SECONDS), launched.logs()
        assert nodes.raylet_of(programs(launched)["vllm-3"]) in nodes.raylets
        scale(broker, 1, wait_seconds=REPLACED_SECONDS)
        assert wait_until(lambda: are_serving(1), REPLACED_SECONDS), launched.logs()
    assert wait_until(lambda: not {"vllm-2", "vllm-3"} & set(programs(launched)), GONE_SECONDS)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


def test_what_the_cluster_has_no_place_for_is_a_table_and_nothing_is_left(start, nodes, tmp_path: Path) -> None:
    wants = tmp_path / "wants.yaml"
    wants.write_text("trainer: {}\nplacement: {timeout: 3, trainer: {gpus: 2}, vllm: {gpus: 2}}\n")
    launched = start("--config", str(wants), "--num-inference-nodes", "3", "--placement-timeout", "3")
    code, _, error = launched.end()
    assert code == 2
    assert "no place for" in error
    assert [line.split() for line in error.splitlines()[1:5]] == [
        ["CPU", "GPU"],
        ["wanted", "5", "8"],
        ["registered", "10", "6"],
        ["free", "6", "0"],
    ]
    assert remains(launched) == []
    assert wait_until(lambda: nodes.free_gpus() == 6.0, GONE_SECONDS)


def test_a_run_waits_for_places_until_a_node_joins_the_cluster(start, nodes, tmp_path: Path) -> None:
    wants = tmp_path / "wants.yaml"
    wants.write_text("trainer: {}\nplacement: {trainer: {gpus: 2}, vllm: {gpus: 2}}\n")
    launched = start("--config", str(wants), "--num-inference-nodes", "3", "--placement-timeout", "120")
    assert wait_until(lambda: nodes.free_gpus() == 0.0, REPLACED_SECONDS)  # three of the four have their places
    assert programs(launched) == {}
    nodes.add()
    try:
        code, _, error = launched.end(120)
        assert (code, error) == (0, ""), launched.logs()
        assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
    finally:
        nodes.raylets.pop().kill()


def test_kill_9_of_the_launcher_ends_every_process_on_every_node(start, nodes) -> None:
    launched = start("--training-steps", "4000")
    launched.wait_for_steps(3)
    assert len(programs(launched)) == 5
    launched.process.kill()
    launched.end()
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
    assert wait_until(lambda: nodes.free_gpus() == 6.0, GONE_SECONDS)


def test_without_the_head_a_run_ends_with_the_line_that_resumes_it_and_goes_on_here(standins) -> None:
    nodes = RayNodes()
    try:
        launched = standins(*FLAGS, "--placement-address", nodes.address, "--training-steps", "4000")
        launched.wait_for_steps(3)
        nodes.gcs.kill()
        code, _, error = launched.end(HEADLESS_SECONDS)
        assert code == 1
        assert f"the Ray head at {nodes.address} does not answer any more" in error
        assert f"--run-dir {launched.run_dir} --resume auto" in error
        assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
    finally:
        nodes.close()
    here = ("--registered-servers", "--weight-bridge-mode", "lora_only", "--num-inference-nodes", "2")
    steps = launched.steps() + 20
    resumed = standins(*here, "--training-steps", str(steps), "--resume", "auto")
    code, _, error = resumed.end()
    assert (code, error) == (0, ""), resumed.logs()
    assert steps_of(resumed) == list(range(1, steps + 1))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_without_the_head_a_run_that_waits_for_places_ends_with_one_line_or_by_its_signal(
    standins, tmp_path: Path, is_stopped: bool
) -> None:
    wants = tmp_path / "wants.yaml"
    wants.write_text("trainer: {}\nplacement: {trainer: {gpus: 2}, vllm: {gpus: 3}}\n")
    nodes = RayNodes()
    try:
        flags = ("--placement-address", nodes.address, "--config", str(wants), "--placement-timeout", "600")
        launched = standins(*FLAGS, *flags)
        assert wait_until(lambda: nodes.free_gpus() == 4.0, REPLACED_SECONDS)  # the trainer has its place
        nodes.gcs.kill()
        if is_stopped:
            launched.process.send_signal(signal.SIGINT)
        code, _, error = launched.end(HEADLESS_SECONDS)
        assert error.count("\n") == 1, error
        told = "stopped by SIGINT" if is_stopped else f"the Ray head at {nodes.address} does not answer any more"
        assert told in error
        assert code == (130 if is_stopped else 1)
        assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
    finally:
        nodes.close()


def test_nothing_at_the_address_is_one_line(standins) -> None:
    begun = time.monotonic()
    code, _, error = standins(*FLAGS, "--placement-address", "127.0.0.1:9").end()
    assert code == 2
    assert "--placement-address 127.0.0.1:9: nothing answers there" in error
    assert error.count("\n") == 1
    assert time.monotonic() - begun < 30
