"""Tiny untrained models of several families, written once per session, and a fake server with a bridge to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from example_trainer.modeling.loading import PolicyOptions
from example_trainer.weights.shared_vllm import SharedOptions, SharedVllmBridge
from example_trainer.weights.testing import ServedFake, served_fake

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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "gpt2": (
        "gpt2",
        {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY, "eos_token_id": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family's name to the directory of a tiny checkpoint of it."""
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


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No manifest of another server is found on the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)


@pytest.fixture
def shared(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[..., tuple[ServedFake, SharedVllmBridge]]]:
    """A function that starts a fake server and a bridge to it."""
    open_things: list[tuple[Any, SharedVllmBridge]] = []

    def start(
        family: str = "qwen2",
        *,
        dtype: str = "float32",
        server_model: str | None = None,
        policy: dict[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[ServedFake, SharedVllmBridge]:
        context = served_fake(tiny_model(server_model or family), tmp_path / "manifest", dtype=dtype)
        fake = context.__enter__()
        options = SharedOptions(
            policy=PolicyOptions(model_name=str(tiny_model(family)), device="auto", **(policy or {})),
            server_url=fake.url,
            wait_timeout_seconds=settings.pop("wait_timeout_seconds", 5.0),
            drain_seconds=0.0,
            **settings,
        )
        bridge = SharedVllmBridge(options)
        open_things.append((context, bridge))
        return fake, bridge

    yield start
    for context, bridge in open_things:
        bridge.close()
        context.__exit__(None, None, None)
