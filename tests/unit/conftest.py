"""Tiny untrained models that the unit tests of the trainer share, each written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

VOCABULARY = 300

_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROTARY_FEATURES = 16  # half the size of a head
LONG_ROPE_CONTEXT = 64
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * ROTARY_FEATURES,
    "long_factor": [1.0 + feature / 4 for feature in range(ROTARY_FEATURES)],
    "original_max_position_embeddings": LONG_ROPE_CONTEXT,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi3-long": (
        "phi3",
        {
            "tie_word_embeddings": False,
            "rope_parameters": _LONG_ROPE,
            "original_max_position_embeddings": LONG_ROPE_CONTEXT,
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY, "eos_token_id": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "llama4": ("llama4_text", {"attention_chunk_size": 16, "moe_layers": []}),
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny checkpoint with a tokenizer."""
    from example_trainer.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny checkpoint with a tokenizer that has a chat template."""
    from example_trainer.testing import make_tiny_model
    from example_trainer.tiny.model import PADDED_VOCABULARY_SIZE
    from example_trainer.tiny.tokenizer import make_tokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("chat-model"), vocabulary=PADDED_VOCABULARY_SIZE)
    make_tokenizer(context_length=128).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    from example_trainer.model import load_policy
    from example_trainer.modeling.loading import PolicyOptions

    return load_policy(PolicyOptions(model_name=str(tiny_model), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the directory of a tiny checkpoint of a model family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            model_type, extra = FAMILIES[family]
            settings = extra if model_type == "gpt2" else {**_SMALL, **extra}
            torch.manual_seed(0)
            config = AutoConfig.for_model(model_type, **settings)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[family])
        return made[family]

    return make
