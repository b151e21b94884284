"""A run on several ranks, through a real broker, equals that of one process; any number of ranks can resume it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_api.testing import served_broker
from atropos_api.wire import Group
from example_trainer.checkpoint_model_files import read_tensors
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.testing import train_recorded

from .conftest import Workbench

STEPS = 4
VOLATILE = ("time/", "perf/", "memory/", "sync/", "timestamp", "policy_version", "alignment/", "staleness/")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["example_trainer.testing", "transformers.models.qwen2.modeling_qwen2", "peft"])
# A large epsilon keeps Adam from turning rounding near a zero gradient into steps of full size.
SETTINGS: dict[str, Any] = {
    "optimizer": "adamw_8bit",  # the default
    "adam_eps": 1e-2,
    "lr": 1e-2,
    "checkpoint_interval": 2,
    "mini_batches": 2,
    "kl_coef": 0.05,
}

RANK = """
import json, os, pathlib, sys
from example_trainer.config import settings_from
from example_trainer.testing import train_recorded

train_recorded(json.loads(pathlib.Path(sys.argv[1]).read_text()) | settings_from(os.environ))
"""


def run(bench: Workbench, world_size: int, meeting: Path, **settings: Any) -> None:
    """Run to the end on `world_size` processes."""
    processes = []
    for rank in range(world_size):
        config = bench.config(
            world_size=world_size, trainer_rank=rank, init_method=f"file://{meeting}", **SETTINGS, **settings
        )
        processes.append(FORKS.Process(target=train_recorded, args=(config.model_dump(mode="json"),)))
        processes[-1].start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0] * world_size


def run_by_torchrun(bench: Workbench, directory: Path, **settings: Any) -> None:
    """Run to the end on two processes that torchrun starts, which find each other by their environment."""
    config = bench.config(**SETTINGS, **settings).model_dump(mode="json", exclude_unset=True)
    program, values = directory / "rank.py", directory / "settings.json"
    program.write_text(RANK)
    values.write_text(json.dumps(config))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    ended = subprocess.run(
        [*torchrun, str(program), str(values)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr[-6000:]


def comparable(directory: Path) -> list[dict[str, Any]]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(VOLATILE)} for line in lines]


def run_alone(bench: Workbench, groups: list[Group], directory: Path) -> None:
    with served_broker() as url:
        apart = Workbench(url=url, model=bench.model, directory=directory)
        apart.submit(groups)
        run(apart, 1, directory / "meeting", run_dir=directory, training_steps=STEPS)


def test_r12_two_ranks_train_as_one_process_by_rows_or_by_layers_and_one_goes_on_from_their_checkpoint(
    bench: Workbench, tmp_path: Path
) -> None:
    """One batch has a group without signal, so that a rank without rows must still take part."""
    groups = bench.record_groups(2 * STEPS - 1)
    groups[2:2] = bench.record_groups(1, reward=lambda _: 1.0, seed=1)
    alone, together = tmp_path / "alone", tmp_path / "together"
    run_alone(bench, groups, alone)

    bench.submit(groups)
    settings = {"run_dir": together, "training_steps": STEPS, "resume": "auto", "save_batches": True}
    run_by_torchrun(bench, tmp_path, **settings | {"training_steps": 2})
    run(bench, 2, tmp_path / "second", **settings | {"training_steps": 3, "trainer_tensor_parallel_size": 2})
    run(bench, 1, tmp_path / "third", **settings)
    received = {path.name for path in (together / "rollouts").glob("*.atb")}
    by_rows = {f"batch-{number}.rank-{rank}.atb" for number in (1, 2) for rank in (0, 1)}
    assert received == by_rows | {"batch-3.atb", "batch-4.atb"}, "ranks that divide layers train the same rows"

    expected, found = comparable(alone), comparable(together)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys()
        assert right == pytest.approx(left, rel=1e-5, abs=1e-5)
    weights = [read_tensors(directory / "latest") for directory in (alone, together)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)


def train_and_tell(settings: dict[str, Any], place: Path) -> None:
    """Train as one rank; keep the error that ends it."""
    try:
        train_recorded(settings)
    except Exception as error:
        place.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def test_every_rank_is_told_why_rank_0_cannot_go_on(bench: Workbench, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training_steps": 1, "batch_timeout": 1.0, "run_dir": tmp_path / "run"}
    places, processes = [tmp_path / f"error of rank {rank}" for rank in range(2)], []
    for rank in range(2):
        config = bench.config(
            world_size=2, trainer_rank=rank, init_method=f"file://{tmp_path / 'meeting'}", **SETTINGS, **settings
        )
        processes.append(FORKS.Process(target=train_and_tell, args=(config.model_dump(mode="json"), places[rank])))
        processes[-1].start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1]
    own, told = (place.read_text(encoding="utf-8") for place in places)
    assert told == f"RanksFailed: rank 0 has failed, so rank 1 stops too: {own}"
