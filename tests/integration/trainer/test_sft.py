"""`atropos-sft` as a process: killed and resumed, it ends bit for bit like an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from example_trainer.checkpoint_model_files import read_tensors
from example_trainer.checkpointing import list_checkpoints
from example_trainer.monitoring.trackers import read_metrics
from example_trainer.sft.cli import run
from example_trainer.testing import make_tiny_model
from example_trainer.tiny.model import PADDED_VOCABULARY_SIZE
from example_trainer.tiny.tokenizer import make_tokenizer

PATIENCE_SECONDS = 120.0
LONG, SHORT = 10_000, 40
"""Steps of the killed run, which cannot end before it is killed, and of the others."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a run on a model and texts that are in a folder of their own."""
    folder = tmp_path_factory.mktemp("sft")
    model = make_tiny_model(folder / "model", vocabulary=PADDED_VOCABULARY_SIZE)
    make_tokenizer(context_length=128).save_pretrained(model)
    texts = [{"text": f"{a} + {a} = {2 * a}"} for a in range(8)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    usual = (
        "--dtype float32 --device cpu --optimizer adamw --batch-size 2 --gradient-accumulation-steps 1 --keep-last 1"
    )
    return [*usual.split(), "--model-name", str(model), "--dataset", str(folder / "texts.jsonl"), "--lr", "1e-3"]


def test_killed_and_resumed_it_ends_like_an_undisturbed_run(flags: list[str], tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    flags = [*flags, "--checkpoint-interval", "10"]
    command = [sys.executable, "-m", "example_trainer.sft", *flags, "--training-steps", str(LONG)]
    process = subprocess.Popen([*command, "--save-path", str(killed)])
    ends = time.monotonic() + PATIENCE_SECONDS
    while not list_checkpoints(killed) and time.monotonic() < ends:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    (reached,) = list_checkpoints(killed)[-1:]
    steps = str(int(reached.name.removeprefix("checkpoint-")) + SHORT)
    assert run([*flags, "--training-steps", steps, "--save-path", str(killed), "--resume", "auto"]) == 0
    assert run([*flags, "--training-steps", steps, "--save-path", str(whole)]) == 0
    one, other = (read_tensors(out / "final_model") for out in (killed, whole))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    left, right = ([row["train/loss"] for row in read_metrics(out / "metrics.jsonl")] for out in (killed, whole))
    assert left == right
    assert len(left) == int(steps)


def test_a_mistake_is_one_line_and_exit_code_2(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "example_trainer.sft", *flags, "--dataset", "missing.jsonl"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "missing.jsonl: cannot be read, since there is no such file or folder" in ended.stderr
