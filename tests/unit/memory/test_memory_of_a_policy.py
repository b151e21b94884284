"""The memory model counts the bytes that a loaded policy, its gradients and its optimizer hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from example_trainer.config import TrainingConfig
from example_trainer.memory.budget import budget
from example_trainer.memory.shapes import local_shape, shape_of
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.testing import make_tiny_model

LORA: dict[str, Any] = {"weight_bridge_mode": "lora_restart", "lora_target_modules": ["all-linear"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "a bf16 copy beside the masters": {},
    "masters that the forward reads": {"dtype": "float32"},
    "no masters": {"master_weights": "none"},
    "the last layer only": {"train_layer_indices": "last-1"},
    "an adapter on a bf16 base": LORA,
    "an adapter in the dtype of its base": {**LORA, "master_weights": "none"},
    "an adapter on the last layer of an fp32 base": {**LORA, "dtype": "float32", "lora_layer_indices": "last-1"},
}
BIASES = 0.02
"""Share of biases in the tiny model's parameters, which the memory model omits; large models have a tenth of it."""


@pytest.fixture(scope="module")
def wider_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary is larger than its layers, as in small models."""
    return make_tiny_model(tmp_path_factory.mktemp("wider"), vocabulary=512, layers=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_policy_holds_what_is_counted(layout: str, wider_model: Path) -> None:
    config = TrainingConfig(model_name=str(wider_model), device="cpu", optimizer="adamw", **LAYOUTS[layout])
    shape = local_shape(str(wider_model))
    assert shape is not None
    counted = budget(shape, config, server_bytes=0.0)
    policy = load_policy(policy_options(config))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    policy.compute(lambda module: module(tokens).logits.float().sum()).backward()
    policy.collect_gradients()
    masters = list(policy.masters.values())
    assert held([*policy.module.parameters(), *masters]) == pytest.approx(counted.weights + counted.masters, rel=BIASES)
    assert held(master.grad for master in masters if master.grad is not None) == pytest.approx(
        counted.gradients, rel=BIASES
    )
    optimizer = make_optimizer(masters, optimizer_settings(config))
    optimizer.step()
    assert held(moments(optimizer.state_dict())) == pytest.approx(counted.states, rel=BIASES)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors; shared memory counts once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    of_parameters = state.get("inner", state)["state"].values()
    return [
        value for each in of_parameters for value in each.values() if isinstance(value, torch.Tensor) and value.ndim
    ]


@pytest.mark.parametrize(
    "model_type", ["cohere", "gemma", "gemma3_text", "lfm2", "llama", "qwen3", "smollm3", "starcoder2"]
)
def test_a_head_that_config_json_does_not_speak_of_is_tied_where_transformers_ties_it(model_type: str) -> None:
    """Published files of such a model leave out what is its family's default."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes)
    written = {name: value for name, value in config.to_dict().items() if name != "tie_word_embeddings"}
    assert shape_of("m", written).tied == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [("qwen3_moe", {"num_experts": 32}), ("glm4_moe", {"n_routed_experts": 32, "n_shared_experts": 1})],
)
def test_the_experts_of_a_mixture_are_counted_whatever_its_family_calls_them(
    model_type: str, experts: dict[str, int]
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_hidden_layers": 16, "intermediate_size": 128, "moe_intermediate_size": 32, "vocab_size": 300}
    config = AutoConfig.for_model(model_type, **sizes, **experts)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert shape_of("m", config.to_dict()).parameters == pytest.approx(counted, rel=0.03)
