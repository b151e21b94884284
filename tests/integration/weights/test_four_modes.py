"""Runs each weight sync mode on a CPU, by the code that `make gpu` runs on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from example_trainer.weights.logprob_parity import TOLERANCES
from tests.gpu.modes import PUBLISHES, run_mode

MOST_COPIES = 1.1

pytestmark = pytest.mark.timeout(1200)


def random_model(directory: Path) -> Path:
    """Write a model with 270 MB of fp32 weights, so that a process's other memory is small against them."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("mode", PUBLISHES)
def test_a_mode_publishes_proves_and_decodes(mode: str, tmp_path: Path) -> None:
    if "ATROPOS_PUBLISHES" not in os.environ:
        pytest.skip("takes minutes; ATROPOS_PUBLISHES=100 runs it")
    figures = run_mode(mode, random_model(tmp_path / "model"), tmp_path / "run", dtype="float32")
    assert figures.served
    assert figures.largest_difference <= TOLERANCES[torch.float32].maximum
    assert figures.tokens_per_second > 0
    if mode == "shared_vllm":
        assert 1 <= figures.copies <= MOST_COPIES
