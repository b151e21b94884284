"""Training a saved batch again gives exactly what the run logged, every time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atropos_api.common.cliconfig import ConfigError
from atropos_api.testing import served_broker
from atropos_api.wire import Batch, Group
from example_trainer.api import encode_batch, read_batch, write_batch
from example_trainer.cli import prepare_directories, record_config
from example_trainer.commands.replay import reproducible, run
from example_trainer.errors import BadBatch

from .conftest import Workbench

NOT_THE_STEP_S = ("timestamp", "policy_version", "step", "sync/recomputed_fraction")


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of three steps that kept its batches and checkpoints."""
    torch.set_num_threads(1)
    with served_broker() as url:
        bench = Workbench(url=url, model=tiny_model, directory=tmp_path_factory.mktemp("replayed"))
        config = bench.config(training_steps=3, checkpoint_interval=1, save_batches=True, torch_threads=1)
        bench.submit(bench.record_groups(6))
        prepare_directories(config)
        record_config(config)
        assert bench.trainer(config, bench.bridge()).run()
        bench.close()
        yield config.required_run_dir


def logged(run_dir: Path, step: int) -> dict[str, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {name: value for name, value in reproducible(rows[step - 1]).items() if name not in NOT_THE_STEP_S}


def test_two_replays_print_the_same_bytes_and_what_the_run_logged(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 3):
        printed = []
        for _ in range(2):
            assert run([str(finished / "rollouts" / f"batch-{step}.atb")]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        shown = json.loads(printed[0])
        assert shown.pop("step") == step
        assert shown == logged(finished, step)


def test_a_replay_takes_other_settings_and_another_beginning(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = str(finished / "rollouts" / "batch-3.atb")
    assert run([batch, "--loss-type", "reinforce_with_baseline", "--checkpoint", "none"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train/loss"] != logged(finished, 3)["train/loss"]
    assert shown["reward/mean"] == logged(finished, 3)["reward/mean"]


def test_what_is_missing_is_one_line_that_names_it(finished: Path, tmp_path: Path) -> None:
    batch = finished / "rollouts" / "batch-3.atb"
    alone = tmp_path / "alone" / "rollouts" / batch.name
    alone.parent.mkdir(parents=True)
    alone.write_bytes(batch.read_bytes())
    with pytest.raises(ConfigError, match=r"checkpoint-2 does not exist; name another with --checkpoint PATH"):
        run([str(alone), "--model-name", "m"])
    with pytest.raises(BadBatch, match="cannot be read: No such file"):
        run([str(tmp_path / "batch-9.atb")])
    (tmp_path / "batch-9.atb").write_bytes(batch.read_bytes()[:100])
    with pytest.raises(BadBatch, match="is not a saved batch"):
        run([str(tmp_path / "batch-9.atb")])
    with pytest.raises(ConfigError, match="takes a batch file first"):
        run(["--lr", "1e-3"])


def test_a_batch_that_columns_cannot_express_is_kept_too(tmp_path: Path) -> None:
    odd = Batch(number=2, run_id="r", groups=[Group(tokens=[[2**40]], masks=[[-100]], scores=[1.0])])
    write_batch(tmp_path / "batch-2.atb", odd)
    assert encode_batch(odd).startswith(b"{")
    assert read_batch(tmp_path / "batch-2.atb") == odd
