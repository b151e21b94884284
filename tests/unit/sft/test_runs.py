"""Whole runs of `atropos-sft`: they learn, resume, evaluate, and leave a model that other programs load."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.checkpoint_model_files import read_tensors
from example_trainer.checkpointing import list_checkpoints
from example_trainer.cli import run as run_grpo
from example_trainer.monitoring.trackers import JsonlTracker, read_metrics
from example_trainer.sft.batches import Sample, SampleOrder
from example_trainer.tiny.tokenizer import CHAT_TEMPLATE

from .conftest import CHATS

Sft = Callable[..., Path]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def same_weights(left: Path, right: Path) -> bool:
    one, other = read_tensors(left), read_tensors(right)
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = module(torch.arange(5, 15)[None]).logits
    return logits


def test_it_learns_the_chats_and_writes_metrics_and_a_summary(sft: Sft) -> None:
    folder = sft("--num-epochs", "8", "--eval-split", "0.2", "--eval-steps", "10", "--lr-schedule", "linear")
    rows, summary = rows_of(folder), json.loads((folder / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(1, 33)), "16 rows in steps of 4, 8 times"
    assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
    assert [row["step"] for row in rows if "sft/eval_loss" in row] == [10, 20, 30, 32]
    assert (rows[3]["sft/epoch"], summary["epochs"], summary["rows"], summary["steps"]) == (1.0, 8.0, 16, 32)
    assert summary["last_loss"] == pytest.approx(rows[-1]["train/loss"])
    assert summary["trained_tokens"] == sum(row["data/trained_tokens"] for row in rows)
    assert rows[0]["train/lr"] > rows[-1]["train/lr"]


def test_the_evaluation_is_the_mean_over_tokens_of_data_that_is_not_learned(sft: Sft, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in CHATS[:3]))
    # At a rate of 0 the model does not change, so the loss of a step over the same rows is the evaluation's.
    learned = sft("--lr", "0", rows=CHATS[:3], folder="learned")
    evaluated = sft("--lr", "0", "--eval-dataset", str(held), rows=CHATS[3:6], folder="evaluated")
    assert rows_of(evaluated)[-1]["sft/eval_loss"] == pytest.approx(rows_of(learned)[0]["train/loss"], abs=1e-5)


@pytest.mark.parametrize("lora", [(), ("--use-lora", "--lora-dropout", "0.3")], ids=["weights", "adapter"])
def test_a_run_that_dies_and_resumes_ends_with_the_weights_of_one_that_does_not(
    sft: Sft, monkeypatch: pytest.MonkeyPatch, lora: tuple[str, ...]
) -> None:
    flags = ("--num-epochs", "2", "--checkpoint-interval", "3", "--lr-schedule", "cosine", *lora)
    whole = sft(*flags, folder="whole")
    log = JsonlTracker.log

    def die(self: JsonlTracker, step: int, metrics: Any) -> None:
        if step == 8:
            raise KeyboardInterrupt
        log(self, step, metrics)

    with monkeypatch.context() as dying:
        dying.setattr(JsonlTracker, "log", die)
        with pytest.raises(KeyboardInterrupt):
            sft(*flags, folder="killed")
    killed = whole.with_name("killed")
    assert [path.name for path in list_checkpoints(killed)] == ["checkpoint-3", "checkpoint-6"]
    sft(*flags, "--resume", "auto", folder="killed")
    assert same_weights(whole / "latest", killed / "latest")
    assert [row["train/loss"] for row in rows_of(killed)] == [row["train/loss"] for row in rows_of(whole)]
    ended, expected = (json.loads((folder / "summary.json").read_text()) for folder in (killed, whole))
    for name in ("steps", "epochs", "first_loss", "last_loss", "trained_tokens"):
        assert ended[name] == expected[name], name
    assert ended["seconds"] > sum(row["time/step"] for row in rows_of(killed))


def test_a_run_that_went_back_and_was_killed_before_its_next_checkpoint_goes_back_again(
    sft: Sft, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--training-steps", "4", "--checkpoint-interval", "2")
    folder = sft(*flags)

    def die(self: JsonlTracker, step: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(JsonlTracker, "log", die)
        with pytest.raises(KeyboardInterrupt):
            sft(*flags, "--resume", str(folder / "checkpoint-2"))
    sft(*flags, "--resume", "auto")
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3, 4]


def test_a_stop_ends_the_run_after_its_step_with_a_checkpoint(sft: Sft, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonlTracker.log

    def stop(self: JsonlTracker, step: int, metrics: Any) -> None:
        log(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as stopping:
        stopping.setattr(JsonlTracker, "log", stop)
        folder = sft("--num-epochs", "2", code=128 + signal.SIGTERM)
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-2"]
    assert not (folder / "final_model").exists()
    sft("--num-epochs", "2", "--resume", "auto")
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 11))


def test_final_model_is_a_model_folder_for_transformers_and_for_grpo(
    sft: Sft, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = sft("--training-steps", "2") / "final_model"
    assert same_weights(final, final.with_name("checkpoint-2"))
    assert not torch.equal(logits_of(final), logits_of(chat_model))
    assert run_grpo(["--model-name", str(final), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["model_name"] == str(final)


def test_an_adapter_s_final_model_is_base_and_adapter_merged(sft: Sft, chat_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = sft("--training-steps", "4", "--use-lora", "--lora-target-modules", "all-linear")
    base: Any = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    module = PeftModel.from_pretrained(base, folder / "latest")
    with torch.no_grad():
        wanted = module(torch.arange(5, 15)[None]).logits
    torch.testing.assert_close(logits_of(folder / "final_model"), wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(wanted, logits_of(chat_model), atol=1e-4)
    alone = sft("--training-steps", "1", "--use-lora", "--no-merge-adapter", folder="alone")
    assert not (alone / "final_model").exists()


def test_a_template_from_a_file_is_learned_with_and_is_in_the_output(sft: Sft, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE.replace("<|end|>", "!<|end|>"))
    folder = sft("--training-steps", "1", "--chat-template", str(template))
    written = AutoTokenizer.from_pretrained(folder / "final_model")
    assert written.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|user|>hi!<|end|>"


def test_overwrite_deletes_the_run_before_and_nothing_else(sft: Sft) -> None:
    folder = sft("--training-steps", "3", "--checkpoint-interval", "1")
    (folder / "notes.txt").write_text("mine")
    sft("--training-steps", "1", "--overwrite")
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-1"]
    assert [row["step"] for row in rows_of(folder)] == [1]
    assert (folder / "notes.txt").read_text() == "mine"


def test_each_row_is_learned_once_an_epoch_in_an_order_that_the_seed_decides() -> None:
    samples: list[Any] = list(range(10))
    orders = {}
    for seed in (0, 1):
        order: SampleOrder = SampleOrder(samples, seed=seed, per_step=4, total=20)
        drawn: list[Sample] = [sample for step in range(1, 6) for sample in order.at(step)]
        assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(samples)
        assert drawn[:10] != drawn[10:]
        assert order.at(2) == drawn[4:8], "a resumed run learns the same rows"
        orders[seed] = drawn
    assert orders[0] != orders[1]
