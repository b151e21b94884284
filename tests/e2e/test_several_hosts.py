"""A run over several hosts learns: broker, trainer, environment and two servers, each with an address of its own.

The hosts share no loopback, no shared memory and no temporary directory, and the servers do not see the run directory.
`ATROPOS_HOSTS=1` runs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example_trainer.processes.tree import wait_until

from .hosts import Host, Hosts, why_not

BASE = Path(__file__).resolve().parents[2] / "example_trainer/tiny/bases/chain-0"
START_SECONDS = 180.0
LEASE_SECONDS = 6
STEPS = 24
SERVER = ("-m", "example_trainer.vllm_api_server", "--model", str(BASE), "--host", "0.0.0.0", "--port", "9001")
SERVER = (*SERVER, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "128")
TRAINER = (
    *("-m", "example_trainer.grpo", "--model-name", str(BASE), "--dtype", "float32", "--batch-size", "16"),
    *("--gradient-accumulation-steps", "8", "--seq-len", "512", "--token-budget", "8192", "--optimizer", "adamw"),
    *("--adam-beta2", "0.95", "--adam-eps", "1e-2", "--weight-decay", "0", "--importance-sampling", "truncated"),
    *("--drain-seconds", "5", "--checkpoint-interval", "0", "--torch-threads", "1"),
)
ADAPTER = ("--lora-r", "64", "--lora-alpha", "64", "--lora-dropout", "0", "--lora-target-modules", "all-linear")
MODES = {
    "lora_only": ("--lr", "2e-3", *ADAPTER),
    "shared_vllm": ("--lr", "5e-4", "--forward-weights", "masters"),
    "none": ("--lr", "5e-4", "--restart-method", "reload", "--vllm-restart-interval", "4"),
}
ADAPTER_SERVER = ("--enable-lora", "--max-lora-rank", "64")
ENVIRONMENT = (
    *("environments/arithmetic_server.py", "serve", "--env.task", "chain", "--env.seed", "1", "--env.group_size", "8"),
    *("--env.max_token_length", "64", "--env.max_num_workers_per_node", "32", "--env.max_batches_offpolicy", "2"),
    *("--env.ensure_scores_are_not_same", "false", "--env.tokenizer_name", str(BASE), "--env.use_wandb", "false"),
    *("--openai.model_name", str(BASE), "--openai.server_type", "vllm"),
)
SECRETS = {"ATROPOS_TOKEN": "token-of-this-test", "ATROPOS_BRIDGE_TOKEN": "bridge-token-of-this-test"}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif("ATROPOS_HOSTS" not in os.environ, reason="minutes: ATROPOS_HOSTS=1"),
]


class Cluster:
    """The programs of one run, each on a host of its own."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.broker, self.trainer, self.environment, *self.servers = hosts
        self.run_dir = folder / "run"
        self.url = f"http://{self.broker.address}:8000"
        self.variables = {**SECRETS, "OMP_NUM_THREADS": "1"}

    def start(self, mode: str, *, steps: int, registered: bool = True, ranks: int = 1) -> Any:
        """Start all of them, and return the trainer's process."""
        self.run_dir.mkdir()
        store = ("--store", "memory", "--server-lease", str(LEASE_SECONDS))
        self.broker.start(
            "broker", "-m", "atropos_api", "--host", "0.0.0.0", "--port", "8000", *store, **self.variables
        )
        servers = self.servers if registered else self.servers[:1]
        asked = ("--openai.policy", "default")
        known = ("--registered-servers", "--num-inference-nodes", str(len(servers)))
        if not registered:
            asked = ("--openai.base_url", f"http://{servers[0].address}:9001/v1")
            known = ("--vllm-host", servers[0].address, "--vllm-port", "9001")
        for server in servers:
            own = ADAPTER_SERVER if mode == "lora_only" else ()
            joins = ("--broker-url", self.url) if registered else ()
            server.start(f"server-{server.number}", *SERVER, *own, *joins, without=(self.run_dir,), **self.variables)
        self.environment.start(
            "environment", *ENVIRONMENT, *asked, "--env.rollout_server_url", self.url, **self.variables
        )
        flags = ("--weight-bridge-mode", mode, *MODES[mode], *known, "--training-steps", str(steps))
        return self._start_trainer(flags, ranks)

    def _start_trainer(self, flags: tuple[str, ...], ranks: int) -> Any:
        """Start the trainer on its host, or its ranks on that one and the next; return the first process."""
        command = (*TRAINER, *flags, "--atropos-url", self.url, "--run-dir", str(self.run_dir))
        if ranks == 1:
            meets = {"MASTER_ADDR": self.trainer.address, "MASTER_PORT": "29511"}
            return self.trainer.start("trainer", *command, "--keep-versions", "2", **self.variables, **meets)
        torchrun = ("-m", "torch.distributed.run", "--nnodes", str(ranks), "--master-addr", self.trainer.address)
        started = [
            host.start(f"rank-{rank}", *torchrun, "--node-rank", str(rank), *command, **self.variables)
            for rank, host in enumerate((self.trainer, self.environment)[:ranks])
        ]
        return started[0]

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def server_states(self) -> list[str]:
        """Return the states of the servers in the broker's registry, in the order of their hosts."""
        asked = f'"{self.url}/v1/servers", headers={{"Authorization": "Bearer {SECRETS["ATROPOS_TOKEN"]}"}}'
        found = json.loads(self.broker.output(f"import httpx; print(httpx.get({asked}).text)"))
        return [row["state"] for row in sorted(found["servers"], key=lambda row: row["url"])]

    def logs(self) -> str:
        folder = self.broker.folder
        return "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in sorted(folder.glob("*.log")))

    def wait_for_more_steps(self, trainer: Any, count: int) -> None:
        wanted = len(self.rows()) + count

        def reached() -> bool:
            assert trainer.poll() is None, self.logs()
            return len(self.rows()) >= wanted

        assert wait_until(reached, START_SECONDS), self.logs()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(tmp_path, 5) as hosts:
        yield Cluster(hosts, tmp_path)


def check_rows(cluster: Cluster, steps: int) -> None:
    rows = cluster.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["policy_version"] > rows[0]["policy_version"]
    assert max(row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row) <= 1e-3
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, rewards


@pytest.mark.parametrize("mode", MODES)
def test_servers_of_other_hosts_get_each_policy_and_the_run_learns(cluster: Cluster, mode: str) -> None:
    trainer = cluster.start(mode, steps=STEPS)
    assert trainer.wait(300) == 0, cluster.logs()
    check_rows(cluster, STEPS)


def test_a_named_host_s_server_gets_each_adapter_and_the_run_learns(cluster: Cluster) -> None:
    trainer = cluster.start("lora_only", steps=STEPS, registered=False)
    assert trainer.wait(300) == 0, cluster.logs()
    check_rows(cluster, STEPS)


def test_two_ranks_on_two_hosts_train_as_one(cluster: Cluster) -> None:
    trainer = cluster.start("shared_vllm", steps=STEPS, ranks=2)
    assert trainer.wait(300) == 0, cluster.logs()
    check_rows(cluster, STEPS)


@pytest.mark.parametrize("mode", ["lora_only", "shared_vllm"])
def test_a_host_whose_cable_is_out_is_left_behind_and_joins_again_at_the_current_version(
    cluster: Cluster, mode: str
) -> None:
    trainer = cluster.start(mode, steps=200)
    cluster.wait_for_more_steps(trainer, 3)
    cluster.servers[1].disconnect()
    assert wait_until(lambda: cluster.server_states()[1] == "gone", LEASE_SECONDS + 10), cluster.logs()
    cluster.wait_for_more_steps(trainer, 3)
    cluster.servers[1].connect()
    assert wait_until(lambda: cluster.server_states() == ["serving"] * 2, 120), cluster.logs()
    cluster.wait_for_more_steps(trainer, 3)
    rows = cluster.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["alignment/diff_max"] for row in rows if "alignment/diff_max" in row) <= 1e-3
