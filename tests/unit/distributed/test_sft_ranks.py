"""Supervised fine-tuning on two ranks ends with the weights, losses and evaluation of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.checkpoint_model_files import read_tensors
from example_trainer.cli import run_trackers
from example_trainer.distributed.ranks import Ranks
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.sft.batches import hold_out, load_tokenizer, read_samples
from example_trainer.sft.config import SftConfig
from example_trainer.sft.fine_tuning import FineTuning, FineTuningData

from .ranks import run_ranks


def fine_tune(ranks: Ranks, settings: dict[str, Any], directory: str) -> None:
    config = SftConfig(**settings, world_size=ranks.world_size, trainer_rank=ranks.rank)
    samples, held = hold_out(read_samples(config.dataset, "train", load_tokenizer(config), config), 0.2)
    torch.manual_seed(config.seed)
    data = FineTuningData(samples=samples, evaluation=held)
    trackers = lambda training: run_trackers(training, writes=ranks.is_main)  # noqa: E731 - a function of one use
    assert FineTuning(config, Path(directory), data, trackers=trackers, ranks=ranks).train()


@pytest.mark.parametrize("lora", [False, True], ids=["sharded", "adapter"])
def test_two_ranks_end_with_the_weights_of_one(chat_model: Path, tmp_path: Path, lora: bool) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"{a} + {a} = {2 * a}"}) + "\n" for a in range(12)))
    settings = {"model_name": str(chat_model), "dataset": str(source), "dtype": "float32", "device": "cpu"}
    settings |= {"optimizer": "adamw", "lr": 1e-3, "batch_size": 2, "gradient_accumulation_steps": 2}
    # Ten rows in steps of four: the last step has two, one for each rank.
    settings |= {"use_lora": lora, "lora_dropout": 0.0} if lora else {}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    fine_tune(Ranks(), settings, str(tmp_path / "one"))
    run_ranks(2, tmp_path / "meeting", fine_tune, settings, str(tmp_path / "two"))
    one, two = (read_tensors(tmp_path / name / "final_model") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)
    left, right = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("train/loss", "sft/eval_loss", "data/trained_tokens", "data/sequences"):
        for a, b in zip(left, right, strict=True):
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-6)
