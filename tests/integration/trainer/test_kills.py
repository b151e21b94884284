"""A trainer that is killed again and again ends with the same state as one that was not.

`ATROPOS_TRAINER_KILLS=10` kills ten times in each of three cases and takes minutes; the default is a short form of the
first.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_api.testing import served_broker
from atropos_api.wire import Group
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.testing import train_recorded

from .conftest import Workbench

SHORT_KILLS = 2
KILLS = int(os.environ.get("ATROPOS_TRAINER_KILLS", SHORT_KILLS))
STEPS = 6 + 2 * KILLS
VOLATILE = ("time/", "perf/", "sync/", "memory/", "timestamp", "policy_version")
CASES: dict[str, dict[str, Any]] = {
    "full weights, several updates a batch, an adaptive reference": {
        "epochs_per_batch": 2,
        "warmup_steps": 5,
        "lr_schedule": "cosine",
        "kl_coef": 0.05,
        "target_kl": 0.01,
        "checkpoint_interval": 2,
        "overlap_publish": True,
    },
    "an adapter with dropout": {
        "weight_bridge_mode": "lora_restart",
        "lora_target_modules": ["all-linear"],
        "lora_dropout": 0.1,
        "optimizer": "adamw_8bit",
        "checkpoint_interval": 1,
        "keep_last": 2,
    },
    "bf16 weights with stochastic rounding": {
        "dtype": "bfloat16",
        "master_weights": "none",
        "optimizer": "adafactor",
        "checkpoint_interval": 3,
    },
}
FORKS = multiprocessing.get_context("forkserver")
"""Program that imports torch once and forks the trainers."""
FORKS.set_forkserver_preload(["example_trainer.testing", "transformers.models.qwen2.modeling_qwen2", "peft"])


def start(config: Any) -> BaseProcess:
    process = FORKS.Process(target=train_recorded, args=(config.model_dump(mode="json"),))
    process.start()
    return process


def finish(config: Any) -> None:
    process = start(config)
    process.join(120)
    assert process.exitcode == 0


def steps_logged(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(config: Any, step: int, delay_seconds: float) -> bool:
    """Start the trainer, kill it some time after it has logged `step`; return True if it was still running."""
    path = config.required_run_dir / "metrics.jsonl"
    step = max(step, steps_logged(path) + 1)  # so that this attempt gets further than the one before
    process = start(config)
    assert process.pid is not None
    while process.is_alive() and steps_logged(path) < step:
        time.sleep(0.002)
    time.sleep(delay_seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def state_at_the_end(directory: Path) -> dict[str, Any]:
    """Return the last checkpoint's tensors, and the small state that does not depend on the attempt."""
    from example_trainer.checkpoint_model_files import read_tensors
    from example_trainer.checkpointing import read_state

    latest = directory / "latest"
    saved = torch.load(latest / "trainer_state.pt", weights_only=True)
    state = read_state(latest)
    return {"tensors": read_tensors(latest), "saved": saved, "step": state.step, "updates": state.updates}


def same(left: Any, right: Any) -> bool:
    """Return True if two states are equal to the bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def comparable(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(VOLATILE)} for line in read_metrics(path)
    ]


def run_alone(bench: Workbench, groups: list[Group], directory: Path, settings: dict[str, Any]) -> None:
    with served_broker() as url:
        apart = Workbench(url=url, model=bench.model, directory=directory)
        apart.submit(groups)
        finish(apart.config(run_dir=directory, **settings))


@pytest.mark.parametrize("case", CASES if KILLS > SHORT_KILLS else list(CASES)[:1])
def test_r25_a_trainer_killed_at_random_steps_ends_with_the_weights_and_metrics_of_one_left_alone(
    bench: Workbench, tmp_path: Path, case: str
) -> None:
    """No batch is skipped or trained twice, which would change all later bits."""
    settings = {"training_steps": STEPS, **CASES[case]}
    groups = bench.record_groups(2 * STEPS, version=None)
    run_alone(bench, groups, tmp_path / "alone", settings)

    bench.submit(groups)
    config = bench.config(run_dir=tmp_path / "killed", resume="auto", **settings)
    generator = random.Random(case)
    for step in sorted(generator.sample(range(STEPS - 4), KILLS)):
        assert kill_after(config, step, generator.uniform(0.0, 0.05))
    finish(config)

    lines = comparable(tmp_path / "killed" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for expected, line in zip(comparable(tmp_path / "alone" / "metrics.jsonl"), lines, strict=True):
        assert line == expected
    assert same(state_at_the_end(tmp_path / "alone"), state_at_the_end(tmp_path / "killed"))
