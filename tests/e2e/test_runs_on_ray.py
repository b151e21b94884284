"""Whole runs on a Ray cluster: a head and three nodes on this machine, the real programs, and parts that are killed.

Each takes minutes; `ATROPOS_PLACEMENT=1` runs them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from example_trainer.processes.tree import is_alive, wait_until
from example_trainer.weights.registered import FIRST_LIMIT_SECONDS, LEAST_LIMIT_SECONDS

from .conftest import Launched
from .killed_run import (
    DEMO,
    FLAGS,
    GROUPS_A_STEP,
    MOST_DIFFERENCE,
    ROOT,
    Run,
    check_groups,
    check_history,
    hash_of,
    record,
)
from .launch_publish_kills import KILLS, MADE
from .ray_cluster import GONE_SECONDS, REPLACED_SECONDS, RayNodes, programs, remains, steps_of
from .recorded_server import RECORDED_VARIABLE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="could not import ray, which is not locked"),
    pytest.mark.skipif("ATROPOS_PLACEMENT" not in os.environ, reason="takes minutes; ATROPOS_PLACEMENT=1 runs it"),
]

logger = logging.getLogger(__name__)

RUN = ("-m", "example_trainer.run")
WITH_KILLS = (str(Path(__file__).with_name("launch_publish_kills.py")),)
TWO_SERVERS = ("--registered-servers", "--num-inference-nodes", "2")
RANKS = ("--world-size", "2", "--no-overlap-publish", "--keep-versions", "0", "--sync-check", "1")
START_SECONDS = 600.0
END_SECONDS = 1500.0
STEPS_A_KILL = 3
LONGEST_PUBLISH_SECONDS = FIRST_LIMIT_SECONDS + LEAST_LIMIT_SECONDS
"""An exchange that runs into its limit, and the next one without the server that was lost."""
COMPARED_STEPS = 16
MOST_START_SECONDS = 8.0
"""Time that a run on Ray may take longer to its first step than one without."""
MOST_STEP_RATIO = 1.1


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with contextlib.closing(RayNodes()) as cluster:
        yield cluster


@pytest.fixture
def start(start_launcher: Callable[..., Launched], nodes: RayNodes, tmp_path: Path) -> Callable[..., Launched]:
    """The launcher of the demo, with its programs on the cluster and a `placement` section."""

    def start(*flags: str, program: Sequence[str] = RUN, placement: Any = (), **rest: Any) -> Launched:
        demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
        demo["placement"] = {"kind": "ray", "address": nodes.address, "timeout": 60} | dict(placement)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(demo))
        return start_launcher(sys.executable, *program, "--config", str(path), "--seed", "1", *flags, **rest)

    return start


def rows_of(launched: Launched) -> list[dict[str, Any]]:
    return [json.loads(line) for line in launched.metrics.read_text().splitlines()]


def lose_node(nodes: RayNodes, process: psutil.Process) -> None:
    """Kill the node that a program runs on; another one joins the cluster only once the program has ended."""
    raylet = nodes.raylet_of(process)
    raylet.kill()
    assert wait_until(lambda: not is_alive(process), GONE_SECONDS)
    nodes.replace(raylet)


def hang_node(nodes: RayNodes, process: psutil.Process, *, until: Callable[[], bool]) -> None:
    """Stop every process of the node that a program runs on, and let them go on later: then all of them have to end."""
    raylet = nodes.raylet_of(process)
    stopped = [raylet, *raylet.children(recursive=True)]
    for each in stopped:
        each.suspend()
    try:
        assert wait_until(until, REPLACED_SECONDS)
    finally:
        for each in stopped:
            each.resume()
    assert wait_until(lambda: not is_alive(process), REPLACED_SECONDS)
    nodes.replace(raylet)


def has_trained_elsewhere(launched: Launched, before: psutil.Process, steps: int) -> bool:
    """Return True once a run has made so many steps by another trainer than the one before."""
    trainers = [process for process in psutil.process_iter() if is_trainer(launched, process)]
    return launched.steps() >= steps and any(process != before for process in trainers)


def is_trainer(launched: Launched, process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(launched.run_dir / "configs/trainer.yaml") in process.cmdline() and is_alive(process)
    return False


def trainer_ranks(launched: Launched) -> dict[str, psutil.Process]:
    """Return the processes of the trainer by their rank."""
    return {process.environ()["RANK"]: process for process in psutil.process_iter() if is_trainer(launched, process)}


def test_the_demo_learns_with_two_servers_of_which_one_loses_its_node(start, nodes: RayNodes) -> None:
    launched = start(*TWO_SERVERS, "--weight-bridge-mode", "lora_only", "--api.keep_batches", "100")
    launched.wait_for_steps(5, START_SECONDS)
    lose_node(nodes, programs(launched)["vllm-2"])
    code, out, error = launched.end(END_SECONDS)
    assert code == 0, error + launched.logs()
    assert "vllm-2 lost its seat on" in out
    rows = rows_of(launched)
    assert steps_of(launched) == list(range(1, len(rows) + 1))
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["accuracy_base"] <= 0.15
    assert summary["accuracy_trained"] >= 0.9
    assert max(row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row) <= 1e-4
    check_groups(launched.run_dir / "broker", len(rows))
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


def test_a_run_on_ray_starts_at_most_eight_seconds_later_and_its_steps_take_the_same_time(
    start, start_launcher, nodes: RayNodes, tmp_path: Path
) -> None:
    """Both are run twice, in turn: the better one on Ray is compared with the worse one here."""
    flags = (*TWO_SERVERS, *FLAGS, "--weight-bridge-mode", "lora_only", "--training-steps", str(COMPARED_STEPS))
    times: dict[str, list[tuple[float, float]]] = {"local": [], "ray": []}
    for number in range(2):
        for placement, taken in times.items():
            begun = time.time()
            run_dir = tmp_path / f"{placement}-{number}"
            if placement == "ray":
                launched = start(*flags, run_dir=run_dir)
            else:
                launched = start_launcher(*DEMO, "--seed", "1", *flags, run_dir=run_dir)
            code, _, error = launched.end(END_SECONDS)
            assert code == 0, error + launched.logs()
            rows = rows_of(launched)
            steps = statistics.median(row["time/step"] for row in rows[COMPARED_STEPS // 4 :])
            taken.append((rows[0]["timestamp"] - begun, steps))
    logger.info("seconds to the first step, and of a step: %s", times)
    starts, steps_taken = ({name: [each[i] for each in taken] for name, taken in times.items()} for i in (0, 1))
    assert min(starts["ray"]) <= max(starts["local"]) + MOST_START_SECONDS, times
    assert min(steps_taken["ray"]) <= MOST_STEP_RATIO * max(steps_taken["local"]), times


def test_ranks_on_two_nodes_train_as_one_and_go_on_together_after_one_of_the_nodes_is_lost(start, nodes) -> None:
    steps = 24
    flags = (*TWO_SERVERS, *RANKS, *FLAGS, "--training-steps", str(steps))
    # A node has three CPUs, so two processes of the trainer are never on one.
    launched = start(*flags, "--api.keep_batches", str(steps), placement={"trainer": {"cpus": 2}})
    launched.wait_for_steps(4, START_SECONDS)
    ranks = trainer_ranks(launched)
    assert nodes.raylet_of(ranks["0"]) != nodes.raylet_of(ranks["1"])
    lose_node(nodes, ranks["1"])
    code, out, error = launched.end(END_SECONDS)
    assert code == 0, error + launched.logs()
    assert "trainer lost its seat on" in out
    check_history(Run("broadcast", launched), steps, most=MOST_DIFFERENCE)
    check_groups(launched.run_dir / "broker", steps)
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


@pytest.mark.parametrize("mode", KILLS)
def test_killed_in_any_phase_of_a_publish_trainer_and_servers_go_on_with_every_batch_and_the_right_tokens(
    start, mode: str
) -> None:
    steps = STEPS_A_KILL * len(KILLS[mode])
    flags = (*TWO_SERVERS, *FLAGS, "--weight-bridge-mode", mode, "--training-steps", str(steps))
    launched = start(*flags, "--api.keep_batches", str(steps), program=WITH_KILLS)
    code, _, error = launched.end(END_SECONDS)
    assert code == 0, error + launched.logs()
    made = (launched.run_dir / MADE).read_text().splitlines()
    assert [line.partition(" ")[2] for line in made] == [
        f"{kill.victim} killed {kill.moment} {kill.call}" for kill in KILLS[mode]
    ], "the run ended before the last kill; raise STEPS_A_KILL"
    check_history(Run(mode, launched), steps, most=MOST_DIFFERENCE)
    check_groups(launched.run_dir / "broker", steps)
    assert max(row["time/sync"] for row in rows_of(launched) if "time/sync" in row) <= LONGEST_PUBLISH_SECONDS
    assert wait_until(lambda: remains(launched) == [], GONE_SECONDS), remains(launched)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_trainer_whose_node_is_lost_or_hangs_ends_with_the_very_weights_of_a_quiet_run_over_the_same_groups(
    start, start_launcher, nodes: RayNodes, tmp_path: Path, hangs: bool
) -> None:
    steps = 24 if hangs else 12
    recorded = tmp_path / "recorded.jsonl"
    record(recorded, groups=steps * GROUPS_A_STEP)
    recorded_server = str(Path(__file__).with_name("recorded_server.py"))
    flags = (*FLAGS, "--training-steps", str(steps), "--registered-servers", "--env", recorded_server)
    variables = {RECORDED_VARIABLE: str(recorded)}
    quiet = start_launcher(*DEMO, "--seed", "1", *flags, run_dir=tmp_path / "quiet", **variables)
    code, _, error = quiet.end(END_SECONDS)
    assert code == 0, error + quiet.logs()
    listed = {"variables": [RECORDED_VARIABLE]}
    killed = start(*flags, placement=listed, run_dir=tmp_path / "killed", **variables)
    killed.wait_for_steps(3, START_SECONDS)
    before = programs(killed)["trainer"]
    if hangs:
        hang_node(nodes, before, until=partial(has_trained_elsewhere, killed, before, killed.steps() + 2))
    else:
        lose_node(nodes, before)
    code, out, error = killed.end(END_SECONDS)
    assert code == 0, error + killed.logs()
    assert "trainer lost its seat on" in out
    hashes = [hash_of(launched.run_dir / f"checkpoint-{steps}") for launched in (quiet, killed)]
    assert hashes[0] == hashes[1]
    assert wait_until(lambda: remains(killed) == [], GONE_SECONDS), remains(killed)
