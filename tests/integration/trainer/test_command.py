"""The trainer as a process: help, mistakes, a whole run, a stop by signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from example_trainer.checkpointing import read_state
from example_trainer.weights.testing import served_fake

from .conftest import Workbench

ROOT = Path(__file__).parents[3]
FORMS = {
    "module": [sys.executable, "-m", "example_trainer.grpo"],
    "package": [sys.executable, "-m", "example_trainer"],
    "path": [sys.executable, "example_trainer/grpo.py"],
}


def run(form: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FORMS[form], *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def arguments(bench: Workbench, directory: Path, **settings: object) -> list[str]:
    values: dict[str, object] = {
        "model-name": bench.model,
        "atropos-url": bench.url,
        "run-dir": directory,
        "dtype": "float32",
        "device": "cpu",
        "batch-size": 8,
        "gradient-accumulation-steps": 1,
        "optimizer": "adamw",
        "training-steps": 2,
        "torch-threads": 1,
        "lr": 1e-6,
    }
    return [part for name, value in (values | settings).items() for part in (f"--{name}", str(value))]


def test_every_way_to_start_it_gives_the_same_help() -> None:
    texts = {run(form, "--help").stdout for form in FORMS}
    assert len(texts) == 1
    assert "--weight-bridge-mode" in texts.pop()


def test_a_dry_run_prints_the_resolved_settings_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer:\n  lr: 3.0e-6\n  clip_eps: 0.1\napi:\n  port: 8002\n")
    found = run(
        "module",
        "--config",
        str(tmp_path / "run.yaml"),
        "--model",
        "m",
        "--clip-eps",
        "0.3",
        "--atropos-token",
        "s3cret",
        "--dry-run",
    )
    settings = json.loads(found.stdout)
    assert (settings["lr"], settings["clip_eps"], settings["model_name"]) == (3e-6, 0.3, "m")
    assert settings["run_dir"].startswith("runs/grpo-")
    assert "s3cret" not in found.stdout


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (["--model-name", "./no-such-model"], "--model-name ./no-such-model: no such directory"),
        (["--model-name", "m", "--dtype", "float16", "--master-weights", "none"], "--dtype float16"),
        (["--model-name", "m", "--clip-ep", "0.1"], "--clip-eps"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mistake: list[str], words: str) -> None:
    found = run("module", *mistake)
    assert (found.returncode, len(found.stderr.splitlines())) == (2, 1)
    assert words in found.stderr


def test_a_broker_that_is_not_there_is_one_line_with_the_words_people_search_for(
    bench: Workbench, tmp_path: Path
) -> None:
    found = run("module", *arguments(bench, tmp_path, **{"atropos-url": "http://127.0.0.1:9", "wait-timeout": 0.5}))
    assert found.returncode == 2
    assert "Atropos API not reachable" in found.stderr.splitlines()[-1]


def test_r33_a_mistyped_host_is_reported_at_once(bench: Workbench, tmp_path: Path) -> None:
    started = time.monotonic()
    found = run("module", *arguments(bench, tmp_path, **{"atropos-url": "http://no-such-host.invalid:8000"}))
    assert found.returncode == 2
    assert "no-such-host.invalid" in found.stderr.splitlines()[-1]
    assert time.monotonic() - started < 10


@pytest.fixture
def server(bench: Workbench, tmp_path: Path) -> Iterator[dict[str, object]]:
    """The settings that name an inference server whose tensors the trainer shares."""
    with served_fake(bench.model, tmp_path) as fake:
        yield {
            "weight-bridge-mode": "shared_vllm",
            "vllm-port": urlsplit(fake.url).port,
            "vllm-config-path": tmp_path / "vllm_bridge_config.json",
        }


def test_a_whole_run_exits_0_and_leaves_metrics_checkpoint_and_config(
    bench: Workbench, server: dict[str, object], tmp_path: Path
) -> None:
    bench.submit(bench.record_groups(4))
    found = run("module", *arguments(bench, tmp_path / "run", **server))
    assert found.returncode == 0, found.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert read_state(tmp_path / "run" / "latest").step == 2
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["trainer"]["training_steps"] == 2
    assert "torch" in record["versions"]


def test_sigterm_ends_it_with_a_checkpoint_and_the_signals_exit_code(
    bench: Workbench, server: dict[str, object], tmp_path: Path
) -> None:
    bench.submit(bench.record_groups(2))
    command = [*FORMS["module"], *arguments(bench, tmp_path / "run", **server, **{"training-steps": 5})]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(command, cwd=ROOT, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            deadline = time.monotonic() + 60
            while "step 1/5" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=15) == 128 + signal.SIGTERM
        finally:
            child.kill()
            child.wait()
    assert read_state(tmp_path / "run" / "latest").step == 1
