"""Placement on a Ray cluster: a head and three nodes on this machine, real raylets, stand-ins for the programs.

The last test has the real programs and takes minutes: `ATROPOS_PLACEMENT=1` runs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from atropos_api.client import BrokerClient
from atropos_api.common.secrets import TokenSource
from example_trainer.commands.scaling import scale
from example_trainer.processes.tree import is_alive, wait_until

from .conftest import Launched

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="could not import ray, which is not locked"),
]

ROOT = Path(__file__).resolve().parents[2]
NODES = Path(__file__).with_name("ray_nodes.py")
GONE_SECONDS = 10.0
REPLACED_SECONDS = 90.0
FLAGS = (
    *("--registered-servers", "--weight-bridge-mode", "lora_only", "--num-inference-nodes", "2"),
    *("--placement", "ray", "--placement-timeout", "20"),
)


class RayNodes:
    """The cluster's program, and the process ids that it reports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_memory_monitor_refresh_ms": "0"},
        )
        told = self._read()
        self.address: str = told["address"]
        self.gcs = psutil.Process(told["gcs"])
        self.raylets = [psutil.Process(pid) for pid in told["raylets"]]

    def ask(self, words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._read()

    def free_gpus(self) -> float:
        return float(self.ask("free").get("GPU", 0.0))

    def replace(self, raylet: psutil.Process) -> None:
        """Start a node in the place of one that was killed."""
        self.raylets.remove(raylet)
        self.raylets.append(psutil.Process(self.ask("add")["raylet"]))

    def raylet_of(self, process: psutil.Process) -> psutil.Process:
        """Return the raylet of the node that a program runs on."""
        return next(parent for parent in process.parents() if parent in self.raylets)

    def close(self) -> None:
        tree = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for process in [psutil.Process(self._process.pid), *tree] if self._process.poll() is None else tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("the cluster's program has ended")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes()
    yield cluster
    cluster.close()


@pytest.fixture
def start(standins: Callable[..., Launched], nodes: RayNodes) -> Callable[..., Launched]:
    """The launcher over stand-ins, with its programs on the cluster."""

    def start(*flags: str, **variables: Any) -> Launched:
        return standins(*FLAGS, "--placement-address", nodes.address, *flags, **variables)

    return start


def programs(launched: Launched) -> dict[str, psutil.Process]:
    """Return the run's programs by the name of their settings file, on every node; `plot` has none."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        for word in process.info["cmdline"] or ():
            if word.startswith(f"{launched.run_dir}/configs/") and is_alive(process):
                found[Path(word).stem] = process
    return found


def remains(launched: Launched) -> list[str]:
    """Return what is left of a run on any node: processes with its directory, and the guardians of its seats."""
    left = [repr(process) for process in programs(launched).values()]
    return left + [repr(process) for process in marked(launched)]


def marked(launched: Launched) -> list[psutil.Process]:
    """Return the processes whose environment has the run's directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(launched.run_dir) in value for value in process.environ().values()) and is_alive(process):
                found.append(process)
    return found


def steps_of(launched: Launched) -> list[int]:
    return [json.loads(line)["step"] for line in launched.metrics.read_text().splitlines()]


def test_a_run_trains_on_the_nodes_and_gives_everything_back(start, nodes: RayNodes) -> None:
    launched = start("--training-steps", "300")
    launched.wait_for_steps(3)
    found = programs(launched)
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


@pytest.mark.parametrize("name", ["vllm-2", "trainer"])
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


def test_a_server_that_is_added_runs_on_a_node_and_one_that_has_drained_gives_its_place_back(start, nodes) -> None:
    token = "a-token-of-this-test"
    launched = start("--training-steps", "4000", ATROPOS_TOKEN=token)
    launched.wait_for_steps(3)
    url = yaml.safe_load((launched.run_dir / "configs/vllm.yaml").read_text())["vllm"]["broker_url"]
    with BrokerClient(url, token=TokenSource(token)) as broker:

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
        code, _, error = launched.end(120)
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


def test_nothing_at_the_address_is_one_line(standins) -> None:
    begun = time.monotonic()
    code, _, error = standins(*FLAGS, "--placement-address", "127.0.0.1:9").end()
    assert code == 2
    assert "--placement-address 127.0.0.1:9: nothing answers there" in error
    assert error.count("\n") == 1
    assert time.monotonic() - begun < 30


def test_the_demo_learns_with_two_servers_of_which_one_loses_its_node(start_launcher, nodes: RayNodes) -> None:
    if "ATROPOS_PLACEMENT" not in os.environ:
        pytest.skip("takes minutes; ATROPOS_PLACEMENT=1 runs it")
    demo = ("-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"), "--seed", "1", *FLAGS)
    launched = start_launcher(sys.executable, *demo, "--placement-address", nodes.address)
    launched.wait_for_steps(5, 900)
    raylet = nodes.raylet_of(programs(launched)["vllm-2"])
    raylet.kill()
    nodes.replace(raylet)
    code, out, error = launched.end(1500)
    assert code == 0, error + launched.logs()
    assert "vllm-2 lost its seat on" in out
    rows = [json.loads(line) for line in launched.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["accuracy_base"] <= 0.15
    assert summary["accuracy_trained"] >= 0.9
    assert max(row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row) <= 1e-4
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)
