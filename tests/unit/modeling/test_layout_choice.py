"""Unit tests: models for which packed rows, or the head alone, would give other logprobs are found before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.errors import UnsupportedModel
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.policy import Policy

LARGE = 40.0


def test_a_model_whose_own_logits_are_not_those_of_its_head_is_refused_though_no_setting_says_so(
    policy: Policy,
) -> None:
    module: Any = policy.module
    forward = module.forward

    def scaled(**arguments: Any) -> Any:
        output = forward(**arguments)
        output.logits = output.logits * 0.5
        return output

    module.forward = scaled
    with pytest.raises(UnsupportedModel, match="other logprobs than its last states and head give"):
        choose_layout(policy)


def test_a_model_that_attends_in_chunks_is_refused(tiny_family: Callable[[str], Path]) -> None:
    policy = load_policy(PolicyOptions(model_name=str(tiny_family("llama4")), dtype="float32", device="cpu"))
    with pytest.raises(UnsupportedModel, match="attention_chunk_size is 16"):
        choose_layout(policy)


@pytest.mark.parametrize("family", ["qwen2-tied", "phi3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_attention_alone_are_packed(tiny_family: Callable[[str], Path], family: str, dtype: str) -> None:
    options = PolicyOptions(model_name=str(tiny_family(family)), dtype=dtype, device="cpu")
    assert choose_layout(load_policy(options)) == "shared"


def test_rows_are_padded_if_they_leak_into_the_next_by_less_than_the_largest_state_rounds(
    tiny_family: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    options = PolicyOptions(model_name=str(tiny_family("lfm2")), dtype="bfloat16", device="cpu")
    policy = load_policy(options)
    _give_a_large_feature(policy.masters)
    assert choose_layout(policy) == "rows"
    assert "depend on the row before" in caplog.text


@torch.no_grad()
def _give_a_large_feature(weights: Mapping[str, torch.Tensor]) -> None:
    """Make one feature of all states many times the others, as in trained models, and hide it from the layers."""
    weights["model.embed_tokens.weight"][:, 0] = LARGE
    for name, weight in weights.items():
        if name.endswith(("operator_norm.weight", "ffn_norm.weight")):
            weight.mul_(2.0 * LARGE / len(weight) ** 0.5)  # the norm divides by the large feature's share
            weight[0] = 0.0
