"""The number of inference servers changes while a run goes on and clients send: no request fails.

The servers are stand-ins that register at a real broker, and the launcher is the real one; the last test has real vLLM
servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from atropos_api.client import BrokerClient
from atropos_api.wire import Fleet, InferenceServer
from example_trainer.commands.scaling import scale
from example_trainer.processes.tree import describe, is_alive, wait_until

from .conftest import Launched
from .registered_standin import PLACES
from .traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
LONG = bool(os.environ.get("ATROPOS_SCALING"))
LIMIT_SECONDS = 60.0
SAMPLED_AT_LEAST = 100
"""Tokens of a server that has its share of a step: 128 answers, divided among three."""
REGISTERED = ("--registered-servers", "--weight-bridge-mode", "lora_only", "--training-steps", "5")
LEASE = ("--api.server_lease", "5")


def generated_tokens(row: InferenceServer) -> int:
    """Return the number of tokens that a real server has sampled."""
    return int(httpx.get(f"{row.url}/bridge/debug", timeout=LIMIT_SECONDS).json()["generated_tokens_total"])


class Scene:
    """A launched run with its broker."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        settings = launched.run_dir / "configs/vllm.yaml"
        assert wait_until(settings.exists, LIMIT_SECONDS), launched.logs()
        self.url = yaml.safe_load(settings.read_text())["vllm"]["broker_url"]
        self.broker = BrokerClient(self.url, retry_seconds=LIMIT_SECONDS)

    @property
    def fleet(self) -> Fleet:
        assert wait_until(lambda: bool(self.broker.get_fleets().fleets), LIMIT_SECONDS), self.launched.logs()
        return self.broker.get_fleets().fleets[0]

    def serving(self) -> list[InferenceServer]:
        return [row for row in self.broker.get_servers().servers if row.state == "serving"]

    def wait_for_serving(self, count: int, limit_seconds: float = LIMIT_SECONDS) -> list[InferenceServer]:
        def reached() -> bool:
            assert self.launched.process.poll() is None, self.launched.logs()
            return len(self.serving()) == count and self.fleet.running == count

        assert wait_until(reached, limit_seconds), (self.broker.get_servers(), self.launched.logs())
        return self.serving()

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "example_trainer.commands.main", *words, "--broker", self.url]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.fixture
def start(standins: Callable[..., Launched]) -> Iterator[Callable[..., Scene]]:
    """Start a run over stand-ins whose trainer does nothing after its steps."""
    scenes: list[Scene] = []

    def begin(*flags: str, **variables: str) -> Scene:
        scenes.append(Scene(standins(*REGISTERED, *LEASE, *flags, STANDIN_TRAINER="hang", **variables)))
        return scenes[-1]

    yield begin
    for scene in scenes:
        scene.broker.close()


def test_from_one_server_to_three_and_back_no_request_fails_and_the_new_ones_take_their_part(start) -> None:
    scene = start()
    (first,) = scene.wait_for_serving(1)
    with Traffic(scene.url) as traffic:
        assert wait_until(lambda: traffic.tokens > 0 or bool(traffic.failures), LIMIT_SECONDS)
        at_one = traffic.tokens_per_second(2.0)
        scaled = scene.verb("scale", "vllm=3")
        assert (scaled.returncode, scaled.stderr) == (0, "")
        assert len({row.url for row in scene.wait_for_serving(3)}) == 3
        # Requests that wait at the first one end there, so the others fill as new ones are made. A server reports those
        # that it computes when it renews its lease.
        full = wait_until(lambda: all(row.running == PLACES for row in scene.serving()), LIMIT_SECONDS)
        assert full, scene.serving()
        at_three = traffic.tokens_per_second(2.0)

        scale(scene.broker, 1, wait_seconds=20.0)
        (left,) = scene.wait_for_serving(1)
        after = traffic.tokens_per_second(0.5)
    assert traffic.failures == []
    assert left.server_id == first.server_id
    assert at_three >= (2.5 if LONG else 1.5) * at_one, (at_one, at_three)
    assert after > 0
    reasons = Counter(row.reason for row in scene.broker.get_servers().servers if row.state == "gone")
    assert reasons == {"it left": 2}
    running = [describe(child) for child in scene.launched.tree() if is_alive(child)]
    assert sum("registered_standin.py" in line for line in running) == 1, "the others' memory is free"


def test_a_drained_server_ends_and_is_not_started_again(start) -> None:
    scene = start("--num-inference-nodes", "2")
    rows = scene.wait_for_serving(2)
    drained = scene.verb("drain", rows[1].url)
    assert (drained.returncode, drained.stderr) == (0, "")
    assert "has left" in drained.stdout or "it left" in drained.stdout
    scene.wait_for_serving(1)
    assert (scene.fleet.wanted, scene.fleet.running) == (1, 1)
    assert json.loads((scene.launched.run_dir / "fleet.json").read_text())["wanted"] == 1
    assert [row.server_id for row in scene.serving()] == [rows[0].server_id]


def test_an_added_server_that_does_not_start_leaves_the_run_as_it_was_and_says_why(start) -> None:
    scene = start(STANDIN_VLLM="lone")
    scene.wait_for_serving(1)
    asked = scene.verb("scale", "vllm=2")  # the server may end before the verb has its answer, which then is the reason
    assert asked.returncode == 0 or "vllm-2 did not start" in asked.stderr, asked
    assert wait_until(lambda: bool(scene.fleet.note), LIMIT_SECONDS), scene.launched.logs()
    assert "vllm-2 did not start: it exited with code 1" in scene.fleet.note
    assert (scene.fleet.wanted, scene.fleet.running) == (1, 1)
    assert scene.launched.process.poll() is None


def test_a_server_that_may_not_be_restarted_again_is_given_up_and_the_run_goes_on_with_the_other(start) -> None:
    scene = start("--num-inference-nodes", "2", "--max-restarts", "0")
    first, _ = sorted(scene.wait_for_serving(2), key=lambda row: row.server_id)
    scene.launched.child("registered_standin.py", "vllm-2.yaml").kill()
    assert wait_until(lambda: bool(scene.fleet.note), LIMIT_SECONDS), scene.launched.logs()
    assert "vllm-2 is given up, and the run goes on with the other servers" in scene.fleet.note
    assert [row.server_id for row in scene.wait_for_serving(1)] == [first.server_id]
    scene.launched.child("registered_standin.py", "vllm.yaml").kill()
    code, _, error = scene.launched.end()
    assert code == 1
    assert "vllm was killed by SIGKILL" in error


@pytest.mark.skipif(not LONG, reason="a second launch: ATROPOS_SCALING=1")
def test_a_killed_launcher_goes_on_with_the_number_that_was_asked_for(start, standins) -> None:
    scene = start()
    scene.wait_for_serving(1)
    assert scene.verb("scale", "vllm=2").returncode == 0
    scene.wait_for_serving(2)
    name = scene.fleet.fleet_id
    scene.launched.process.kill()
    scene.launched.process.communicate(timeout=LIMIT_SECONDS)
    (scene.launched.run_dir / "configs/vllm.yaml").unlink()  # otherwise it names the broker of the killed launcher
    again = start("--resume", "auto")
    again.wait_for_serving(2)
    assert (again.fleet.fleet_id, again.fleet.wanted) == (name, 2)


def test_where_the_servers_are_fixed_the_launcher_says_which_mode_has_others(standins, tmp_path) -> None:
    command = [sys.executable, "-m", "example_trainer.run", "--model-name", str(tmp_path / "model"), "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False).stdout
    assert "atropos scale cannot change it: servers that come and go take weights by broadcast" in shown


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not LONG, reason="minutes: ATROPOS_SCALING=1")
def test_real_servers_from_one_to_three_and_back_while_the_demo_trains_and_each_soon_has_its_share(
    start_launcher: Callable[..., Launched],
) -> None:
    flags = ("--weight-bridge-mode", "lora_only", "--registered-servers", "--training-steps", "1000")
    quick = ("--seed", "1", "--env.eval_at_start", "false", "--env.eval_at_end", "false")
    run = ("-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"))
    scene = Scene(start_launcher(sys.executable, *run, *flags, *quick))
    scene.launched.wait_for_steps(1, 600)
    assert scene.verb("scale", "vllm=3").returncode == 0
    servers = scene.wait_for_serving(3, 600)
    began, before = scene.launched.steps(), [*map(generated_tokens, servers)]

    def all_sample() -> bool:
        return min(map(int.__sub__, map(generated_tokens, servers), before)) > SAMPLED_AT_LEAST

    assert wait_until(all_sample, LIMIT_SECONDS), scene.serving()
    assert scene.launched.steps() - began <= 2, "they had their share by the second publish"
    assert scene.verb("scale", "vllm=1").returncode == 0
    scene.wait_for_serving(1, 300)
    scene.launched.wait_for_steps(scene.launched.steps() + 2, 300)
    rows = [json.loads(line) for line in scene.launched.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert scene.broker.status()["dropped_groups"] == {}
    scene.broker.close()
