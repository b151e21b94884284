"""`kill -9` under the real launcher, mode by mode: the run goes on with the right version, or it ends with one line.

A server is started again inside one launch, by the launcher or by the trainer that owns it; the loss of the trainer
ends the run, and the same command with `--resume auto` continues it. After each end nothing of the run is left.
`ATROPOS_BRIDGE_KILLS=all` kills five times in each mode, and the server in a run of 20 steps in each, and takes half an
hour; the default is one run of 20 steps in `shared_vllm`, whose trainer is killed and then its server.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from example_trainer.processes.cleanup import SHARED_MEMORY, mapped_files
from example_trainer.processes.tree import is_alive, wait_until
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weight_protocol.manifest import load_manifest
from example_trainer.weight_protocol.shm_header import SegmentHeader

from .conftest import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
DEMO = (sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"))
STEPS, KILLED_AT_STEP = 20, 5
FLAGS = (
    *("--checkpoint-interval", "1", "--keep-last", "2", "--resume", "auto"),
    *("--vllm-restart-interval", "3", "--env.eval_at_start", "false"),
)
EVERY_CHECK = ("--sync-check", "every")
VICTIMS = ("server", "engine", "trainer mid-publish", "trainer", "trainer mid-publish")
RESTARTING = frozenset({"lora_restart", "none"})
ASKED = os.environ.get("ATROPOS_BRIDGE_KILLS", "")
MODES = {mode: ("--weight-bridge-mode", mode) for mode in ("shared_vllm", "lora_only", "lora_restart", "none")}
MODES["broadcast"] = ("--weight-bridge-mode", "shared_vllm", "--num-inference-nodes", "2")
START_SECONDS = 600.0
END_SECONDS = 30.0
STEPS_TO_COMPARE = 3
"""The first batches of a launch hold what was sampled before it, under weights that the trainer no longer has."""


@dataclass
class Run:
    """One run of a mode over as many launches as its kills make necessary."""

    mode: str
    start: Callable[..., Launched]
    directory: Path
    flags: tuple[str, ...] = ("--training-steps", "400", *EVERY_CHECK)
    launched: Launched = field(init=False)
    tree: set[psutil.Process] = field(default_factory=set)
    memory: set[str] = field(default_factory=set)

    def launch(self) -> None:
        self.launched = self.start(*DEMO, *FLAGS, *self.flags, *MODES[self.mode], run_dir=self.directory)

    def look(self) -> None:
        """Remember who belongs to the run now, and what of /dev/shm they have mapped."""
        self.tree |= set(self.launched.tree())
        self.memory |= set().union(*(mapped_files(process.pid) for process in self.tree))

    def rows(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def version(self) -> int:
        return int(self.rows()[-1]["policy_version"])

    def wait_for_steps(self, more: int) -> None:
        goal = len(self.rows()) + more
        self.wait_for(lambda: len(self.rows()) >= goal)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        def looked() -> bool:
            assert self.launched.process.poll() is None, (self.launched.end(), self.launched.logs())
            self.look()
            return reached()

        assert wait_until(looked, START_SECONDS, interval_seconds=0.2), self.launched.logs()

    @property
    def trainer(self) -> psutil.Process:
        return self.launched.child("example_trainer.grpo")

    def server(self) -> psutil.Process:
        """The newest server of the run that has an engine; others may be on their way."""
        begun: list[psutil.Process] = []

        def found() -> bool:
            begun[:] = [server for server in filter(_is_server, self.launched.tree()) if _engine_of(server)]
            return bool(begun)

        assert wait_until(found, START_SECONDS, interval_seconds=0.2)
        return max(begun, key=psutil.Process.create_time)

    def victim(self, name: str) -> psutil.Process:
        if name == "engine":
            return _engine_of(self.server()) or self.server()
        if name == "trainer mid-publish":
            self.await_publish()
        return self.server() if name == "server" else self.trainer

    def await_publish(self) -> None:
        """Return in the middle of a publish: tensors half written, an adapter unproven, a new server on its way."""
        if self.mode == "shared_vllm":
            header = SegmentHeader(Path(load_manifest(self.directory / "bridge/vllm_bridge_config.json").header_path))
            assert wait_until(lambda: header.state().torn, START_SECONDS, interval_seconds=0.0)
            header.close()
        elif self.mode in RESTARTING:
            served = self.directory / "served"
            known = {path.name for path in served.iterdir()}
            assert wait_until(lambda: {path.name for path in served.iterdir()} - known != set(), START_SECONDS)
            time.sleep(random.Random(len(self.rows())).uniform(0.0, 8.0))
        else:
            settings = json.loads((self.directory / "config.json").read_text())["trainer"]
            client = ServerClient(f"http://127.0.0.1:{settings['vllm_port']}")
            version = client.info().policy_version
            assert wait_until(lambda: client.info().policy_version != version, START_SECONDS)
            client.close()

    def left(self) -> list[str]:
        """List the remains of the ended run: processes, shared memory, temporary directories."""
        wait_until(lambda: not any(map(is_alive, self.tree)), 5)
        processes = [repr(process) for process in self.tree if is_alive(process)]
        memory = [name for name in self.memory if (SHARED_MEMORY / name).exists()]
        return [*processes, *memory, *(path.name for path in self.launched.scratch.glob("atropos-*"))]


def _engine_of(server: psutil.Process) -> psutil.Process | None:
    try:
        return next((child for child in server.children() if "EngineCore" in child.name()), None)
    except psutil.Error:
        return None


def _is_server(process: psutil.Process) -> bool:
    try:
        return "example_trainer.vllm_api_server" in process.cmdline() and os.getsid(process.pid) == process.pid
    except (psutil.Error, OSError):
        return False


def kill(run: Run, victim: str) -> str:
    """Kill, see to it that the run goes on or ends well; how it did."""
    goes_on = not victim.startswith("trainer")
    family = [run.server(), *run.server().children(recursive=True)] if goes_on else []
    version = run.version
    run.victim(victim).kill()
    killed_at = time.monotonic()
    run.look()
    if goes_on:
        run.wait_for(lambda: run.version > version)
        # A server that has handed its connections over may still be ending.
        assert wait_until(lambda: not any(map(is_alive, family)), END_SECONDS)
        return f"went on at version {run.version} after {time.monotonic() - killed_at:.1f} s"
    code, _, error = run.launched.end(120)
    assert code == 1, error
    seconds = run.launched.ended_at - killed_at
    assert seconds < END_SECONDS
    first = error.splitlines()[0]
    assert first.startswith("atropos-grpo-run: error: trainer ")
    assert run.left() == []
    return f"ended after {seconds:.1f} s: {first[:160]}"


@pytest.mark.parametrize("mode", MODES)
def test_killed_again_and_again_a_run_goes_on_at_the_right_version_or_ends_with_a_line_and_leaves_nothing(
    start_launcher: Callable[..., Launched], tmp_path: Path, mode: str
) -> None:
    if not is_asked(mode):
        pytest.skip(f"takes minutes; ATROPOS_BRIDGE_KILLS={mode} or =all runs it")
    run = Run(mode, start_launcher, tmp_path / "run")
    run.launch()
    *earlier, last = VICTIMS
    for victim in earlier:
        run.wait_for_steps(1)
        logger.info("%s, %s: %s", mode, victim, kill(run, victim))
        if run.launched.process.poll() is not None:
            run.launch()
    run.wait_for_steps(STEPS_TO_COMPARE)
    logger.info("%s, %s: %s", mode, last, kill(run, last))
    check_history(run)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_server_is_killed_at_step_5_of_20_ends_with_20_steps(
    start_launcher: Callable[..., Launched], tmp_path: Path, mode: str
) -> None:
    """In `shared_vllm` the trainer is killed in the middle of a publish before, at the first step."""
    if mode != "shared_vllm" and not is_asked(mode):
        pytest.skip(f"takes a minute; ATROPOS_BRIDGE_KILLS={mode} or =all runs it")
    run = Run(mode, start_launcher, tmp_path / "run", ("--training-steps", str(STEPS)))
    run.launch()
    if mode == "shared_vllm":
        run.wait_for_steps(1)
        logger.info("%s, trainer: %s", mode, kill(run, "trainer mid-publish"))
        run.launch()
    run.wait_for(lambda: len(run.rows()) >= KILLED_AT_STEP)
    run.server().kill()
    code, out, error = run.launched.end(START_SECONDS)
    assert code == 0, error + run.launched.logs()
    assert len(run.rows()) == STEPS
    check_history(run, most=1e-3)  # a version off by one differs by 1e-2; a trained policy is sharp, and rounds more
    if mode not in RESTARTING:  # there the trainer starts its own server again
        assert "vllm was killed by SIGKILL after " in out
        assert "restart 1 of 3" in out
    assert run.left() == []


def is_asked(mode: str) -> bool:
    return ASKED == "all" or mode in ASKED.split(",")


def check_history(run: Run, *, most: float = 1e-4) -> None:
    """No step is lost or done twice, versions only rise, and each batch was sampled by what its stamp says."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(versions)
    compared = [row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row]
    logger.info("%s: %d steps, %d compared, largest difference %.1e", run.mode, len(rows), len(compared), max(compared))
    assert max(compared) <= most
