"""The demo with every part real: it learns, its control does not, and after a kill everything is cleaned up.

A launch costs some twenty seconds of imports on two cores, so each test checks many things in one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from example_trainer.processes.tree import is_alive, wait_until
from example_trainer.tiny import ensure_base

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "configs/demo.yaml")
LAUNCHER = (sys.executable, "-m", "example_trainer.run", "--config", DEMO)
LIMIT_SECONDS = 10.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def base_model() -> str:
    return str(ensure_base("chain"))


@pytest.fixture
def demo(start_launcher, base_model: str) -> Callable[..., Any]:
    def start(*flags: str, run_dir: Path | None = None, **variables: str) -> Any:
        return start_launcher(*LAUNCHER, *flags, run_dir=run_dir, **variables)

    return start


@pytest.fixture
def shared_memory_left(base_model: str) -> Iterator[Callable[[str], list[str]]]:
    """Return the segments that are left of the server with this boot id."""

    def left(boot_id: str) -> list[str]:
        return [path.name for path in Path("/dev/shm").iterdir() if boot_id in path.name]

    return left


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def means(values: list[float], window: int = 5) -> list[float]:
    return [sum(values[end - window : end]) / window for end in range(window, len(values) + 1)]


def boot_id_of(run_dir: Path) -> str:
    return json.loads((run_dir / "bridge/vllm_bridge_config.json").read_text())["boot_id"]


def test_the_demo_learns(demo, traces) -> None:
    launched = demo("--training-steps", "40", "--seed", "1")
    launched.wait_for_steps(1, 300)
    tree, boot_id = launched.tree(), boot_id_of(launched.run_dir)
    code, out, error = launched.end(300)
    assert (code, error) == (0, ""), launched.logs()
    rows = rows_of(launched.run_dir)
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(means([row["reward/mean"] for row in rows])) >= 0.9
    assert summary["accuracy_base"] <= 0.15
    assert summary["accuracy_trained"] >= 0.9
    assert rows[0]["response/length_mean"] < 16
    assert means([row["response/length_mean"] for row in rows])[-1] > 25
    # R5: what trainer and server compute for the same tokens under the same version.
    assert all(row["alignment/diff_max"] <= 1e-4 for row in rows if "alignment/diff_max" in row)
    assert any("alignment/diff_max" in row for row in rows)
    assert (launched.run_dir / "checkpoint-40/config.json").exists()
    assert (launched.run_dir / "reward.png").exists()
    page = launched.run_dir / "rollouts/environment.html"
    assert f"rollouts: {page}\n" in out
    assert page.read_text().count("Rollout 1") == len(page.with_suffix(".jsonl").read_text().splitlines()) >= 20
    assert set(summary["split_seconds"]) >= {"imports", "engine", "first batch", "steps"}
    assert re.search(r"accuracy, held-out problems.*->", out)
    assert traces(launched, tree) == []
    assert not [path for path in Path("/dev/shm").iterdir() if boot_id in path.name]


@pytest.mark.skipif("ATROPOS_LEARNING" not in os.environ, reason="another learning run; ATROPOS_LEARNING=1 runs it")
def test_with_advantages_shuffled_nothing_is_learnt(demo, tmp_path: Path) -> None:
    """The control run has its rewards shuffled inside each batch.

    It differs from the run above in this flag only; the seed is the same.
    """
    run_dir = tmp_path / "control"
    flags = ("--training-steps", "40", "--seed", "1", "--shuffle-advantages", "--env.eval_at_end", "false")
    launched = demo(*flags, run_dir=run_dir)
    code, _, error = launched.end(300)
    assert code == 0, error + launched.logs()
    assert means([row["reward/mean"] for row in rows_of(run_dir)])[-1] < 0.5


COURSE_TEST_RUN = shlex.split(
    "--n-grpo-steps 10 --eval-steps 2 --rollout-batch-size 64 --train-batch-size 64 --gradient-accumulation-steps 32 "
    "--model-path tiny/chain --wandb-project cs336-grpo --wandb-run-name test-run"
)
COURSE_FULL_RUN = shlex.split("--model-path tiny/chain --wandb-project cs336-grpo --wandb-run-name grpo-baseline")


@pytest.mark.parametrize("example", [COURSE_TEST_RUN, COURSE_FULL_RUN])
def test_the_course_guide_s_examples_are_understood(example: list[str]) -> None:
    shown = subprocess.run([*LAUNCHER, *example, "--dry-run"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert "wandb_project: cs336-grpo" in shown.stdout


def test_the_course_guide_s_test_run_trains_the_tiny_model(demo, traces) -> None:
    """Ten steps of 64 sequences in 32 micro-batches, evaluated every second step."""
    launched = demo(*COURSE_TEST_RUN, "--env.eval_at_start", "false", "--env.eval_at_end", "false")
    launched.wait_for_steps(1, 300)
    tree = launched.tree()
    code, _, error = launched.end(300)
    assert (code, error) == (0, ""), launched.logs()
    rows = rows_of(launched.run_dir)
    assert [row["step"] for row in rows] == list(range(1, 11))
    trainer = json.loads((launched.run_dir / "config.json").read_text())["trainer"]
    assert (trainer["batch_size"], trainer["gradient_accumulation_steps"]) == (2, 32)
    evaluated = {path.name for path in (launched.run_dir / "evals").glob("step-*")}
    assert len(evaluated) >= 3
    assert traces(launched, tree) == []


def test_kill_9_of_the_launcher_leaves_nothing(demo, traces, shared_memory_left) -> None:
    launched = demo("--training-steps", "400")
    launched.wait_for_steps(2, 300)
    tree, boot_id = launched.tree(), boot_id_of(launched.run_dir)
    launched.process.kill()
    launched.end()
    assert wait_until(lambda: not any(map(is_alive, tree)) and not shared_memory_left(boot_id), LIMIT_SECONDS)
    assert traces(launched, tree) == []


def test_four_programs_started_by_hand_in_the_wrong_order_train_too(base_model: str, tmp_path: Path) -> None:
    """Trainer first, broker last: each waits for what it needs."""
    broker, server = free_ports(2)
    commands = {
        "trainer": (
            *("-m", "example_trainer.grpo", "--config", DEMO, "--model-name", base_model),
            *("--run-dir", str(tmp_path), "--training-steps", "6", "--atropos-url", f"http://127.0.0.1:{broker}"),
            *("--vllm-port", str(server), "--vllm-config-path", str(tmp_path / "vllm_bridge_config.json")),
        ),
        "environment": (
            *("-m", "environments.arithmetic_server", "serve", "--env.tokenizer_name", base_model),
            *("--env.rollout_server_url", f"http://127.0.0.1:{broker}", "--openai.model_name", base_model),
            *("--openai.base_url", f"http://127.0.0.1:{server}/v1", "--env.data_dir_to_save_evals", str(tmp_path)),
        ),
        "vllm": (
            *("-m", "example_trainer.vllm_api_server", "--model", base_model, "--port", str(server)),
            *("--dtype", "float32", "--max-model-len", "512"),
        ),
        "broker": ("-m", "atropos_api", "--port", str(broker), "--store", "memory"),
    }
    variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": str(tmp_path)}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (tmp_path / f"{name}.log").open("w") as log:
                started[name] = subprocess.Popen(
                    [sys.executable, *command], stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **variables}
                )
        assert started["trainer"].wait(240) == 0, (tmp_path / "trainer.log").read_text()
        assert started["environment"].wait(60) == 0, (tmp_path / "environment.log").read_text()
        assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 7))
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            process.wait(30)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--trainig-steps", "3"], "unknown option --trainig-steps, did you mean --training-steps?"),
        (["--model-name", "/nowhere/model"], "--model-name /nowhere/model: no such directory"),
        (
            ["--model-name", "tiny/chian"],
            "--model-name tiny/chian: no tiny model has the task 'chian', did you mean chain?",
        ),
        (["--openai.server_type", "openai"], "set --openai.server_type vllm"),
        (["--env.group_sizee", "3"], "unknown option --env.group_sizee, did you mean --env.group-size?"),
        (["--atropos-url", "http://nowhere.invalid:1"], "the broker's host 'nowhere.invalid' cannot be resolved"),
        (["--vllm-quantization", "awq"], "quantised weights cannot be trained in place"),
    ],
)
def test_a_newcomers_mistake_is_one_clear_line_and_exit_code_2(demo, flags: list[str], told: str) -> None:
    code, _, error = demo(*flags).end(60)
    assert code == 2
    assert told in error
    assert error.count("\n") == 1


def test_a_taken_port_is_reported_with_its_holder_and_the_flag(demo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, error = demo("--vllm-port", str(port)).end(60)
    assert code == 2
    assert re.search(rf"port {port} is taken by pid {os.getpid()} .* choose another with --vllm-port", error)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
