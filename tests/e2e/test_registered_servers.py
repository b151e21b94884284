"""Inference servers come and go while a run trains: real vLLM servers, one of them started by hand.

One joins late, one is killed and started again by the launcher, one is stopped for longer than its lease, one is
drained. No server answers with weights that were not current when it was asked, and no step is missing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from atropos_api.client import BrokerClient
from atropos_api.wire import InferenceServer
from example_trainer.processes.tree import MARK_VARIABLE, wait_until

from .conftest import Launched

ROOT = Path(__file__).resolve().parents[2]
LEASE_SECONDS = 6.0
START_SECONDS = 300.0
FLAGS = (
    *("--config", str(ROOT / "configs/demo.yaml"), "--seed", "1", "--training-steps", "1000"),
    *("--weight-bridge-mode", "lora_only", "--registered-servers", "--api.server_lease", str(LEASE_SECONDS)),
    *("--env.eval_at_start", "false", "--env.eval_at_end", "false"),
)
TOKEN = "bridge-token-of-this-test"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


class Run:
    """A run of the launcher, its broker's registry, and a second server that joins it."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.first = self.server_process()
        words = self.first.cmdline()
        self.settings_file = words[words.index("--config") + 1]
        settings = yaml.safe_load(Path(self.settings_file).read_text())["vllm"]
        self.broker = BrokerClient(settings["broker_url"])
        self.late: subprocess.Popen[bytes] | None = None

    def server_process(self) -> psutil.Process:
        return self.launched.child("vllm_api_server")

    def start_late(self) -> None:
        command = (sys.executable, "-m", "example_trainer.vllm_api_server", "--config", self.settings_file)
        environ = {**psutil.Process(self.first.pid).environ(), "ATROPOS_BRIDGE_TOKEN": TOKEN}
        del environ[MARK_VARIABLE]  # with it, this server would end with the first one, whose process it seems to be
        with (self.launched.run_dir / "late.log").open("wb") as log:
            self.late = subprocess.Popen(
                [*command, "--port", "0", "--server-id", "late"],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environ,
            )

    def row(self, is_late: bool) -> InferenceServer | None:
        rows = [row for row in self.broker.get_servers().servers if (row.server_id == "late") == is_late]
        return next((row for row in rows if row.state != "gone"), None)

    def state(self, is_late: bool) -> str:
        row = self.row(is_late)
        return "gone" if row is None else row.state

    def wait_for(self, is_late: bool, state: str) -> None:
        """Wait for a server's state; until it is reached, ask the server for tokens, which must be current."""

        def reached() -> bool:
            assert self.launched.process.poll() is None, self.launched.logs()
            self.check_tokens(is_late)
            return self.state(is_late) == state

        late = self.launched.run_dir / "late.log"
        assert wait_until(reached, START_SECONDS), self.launched.logs() + late.read_text()[-3000:]

    def check_tokens(self, is_late: bool) -> int | None:
        """Ask a server for tokens; if it answers, their version has to be one that was current. Return it."""
        row, current = self.row(is_late), self.current_version()
        if row is None:
            return None
        request = {"prompt": {"prompt_token_ids": [1, 2]}, "max_tokens": 4}
        try:
            answer = httpx.post(f"{row.url}/generate", json=request, timeout=30)
        except httpx.HTTPError:
            return None
        if answer.status_code != httpx.codes.OK:
            assert answer.status_code in {404, 503}, answer.text
            return None
        versions = [span[-1] for spans in answer.json()["policy_versions"] for span in spans]
        assert versions, answer.text
        assert current is not None
        assert min(versions) >= current - 1, (versions, current)
        return min(versions)

    def current_version(self) -> int | None:
        status: dict[str, Any] = self.broker.status()
        return status["run"]["policy_version"]

    def wait_for_more_steps(self, count: int) -> None:
        self.launched.wait_for_steps(self.launched.steps() + count, START_SECONDS)


@pytest.fixture
def run(start_launcher: Callable[..., Launched]) -> Iterator[Run]:
    command = (sys.executable, "-m", "example_trainer.run", *FLAGS)
    launched = start_launcher(*command, ATROPOS_BRIDGE_TOKEN=TOKEN)
    launched.wait_for_steps(1, START_SECONDS)
    made = Run(launched)
    yield made
    if made.late is not None and made.late.poll() is None:
        made.late.kill()
        made.late.wait()
    made.broker.close()


def test_servers_come_and_go_and_each_token_is_of_a_current_version(run: Run) -> None:
    run.start_late()
    run.wait_for(is_late=True, state="serving")

    run.server_process().send_signal(signal.SIGKILL)
    run.wait_for_more_steps(2)  # by the late one alone, or by both again
    run.wait_for(is_late=False, state="serving")

    assert run.late is not None
    run.late.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS + 2)
    assert run.state(is_late=True) == "gone"
    run.wait_for_more_steps(2)
    run.late.send_signal(signal.SIGCONT)
    run.wait_for(is_late=True, state="serving")

    run.broker.drain_server("late")
    assert run.late.wait(60) == 0
    run.wait_for_more_steps(1)

    run.launched.process.send_signal(signal.SIGTERM)
    run.launched.end(60)
    rows = [json.loads(line) for line in run.launched.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    compared = [row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row]
    assert max(compared) <= 1e-4
