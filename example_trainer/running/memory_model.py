"""How much GPU memory a training run takes, from the model's shape alone: pure arithmetic, nothing measured, no torch.

Shared mode: the served weights exist once, inside vLLM's share of the GPU, and the trainer adds masters, gradients,
optimizer states and activations. Adapter modes: trainer and vLLM each hold the frozen base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SERVED_BYTES = 2
"""A served weight is bf16."""
OPTIMIZER_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.02}
"""Per trained parameter beside an fp32 master: two fp32 moments, two bytes, or a row and a column each matrix."""
RUNTIME_BYTES = 3 * 2**30
"""Two CUDA contexts, vLLM's graphs and workspaces, the trainer's allocator slack."""
KEPT_PER_LAYER = 1.0
"""With activation checkpointing each layer keeps its input: hidden-size values a token."""
WORKING_SET = 18.0
"""Values a token that one recomputed layer holds, in hidden sizes beside its feed-forward's three."""
ROUNDED_AT_ONCE = 1 << 24
"""Weights that stochastic rounding holds in fp32 at one time, with their gradients; a larger tensor is held whole."""
LOGIT_COPIES = 3
"""fp32 arrays of the size chunk x vocabulary that the chunked head holds at its peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the arithmetic needs of a decoder with gated feed-forward and grouped key-value heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * SERVED_BYTES


REFERENCE_SHAPES: Mapping[str, ModelShape] = {
    "8B": ModelShape(
        name="8B (Llama 3.1's shape)",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocabulary=128256,
    ),
    "14B": ModelShape(
        name="14B (Qwen 2.5's shape)",
        hidden=5120,
        layers=48,
        heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate=13824,
        vocabulary=152064,
    ),
    "24B": ModelShape(
        name="24B (Mistral Small's shape)",
        hidden=5120,
        layers=40,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=32768,
        vocabulary=131072,
    ),
}


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; `KeyError` names a field it lacks."""
    text = config.get("text_config", config)
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        intermediate=int(text["intermediate_size"]),
        vocabulary=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to train, as flags of the trainer."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"]
    master_weights: Literal["fp32", "host", "none"] = "fp32"
    last_layers: int | None = None
    lora_rank: int | None = None

    @property
    def flags(self) -> str:
        if self.lora_rank is not None:
            return f"--weight-bridge-mode lora_only --lora-r {self.lora_rank} --optimizer {self.optimizer}"
        parts = ["--weight-bridge-mode shared_vllm", f"--optimizer {self.optimizer}"]
        if self.master_weights != "fp32":
            parts.append(f"--master-weights {self.master_weights}")
        if self.last_layers is not None:
            parts.append(f"--train-layer-indices last-{self.last_layers}")
        return " ".join(parts)

    def trained_parameters(self, shape: ModelShape) -> int:
        if self.lora_rank is not None:
            query_and_value = 2 * shape.hidden + shape.head_dim * (shape.heads + shape.kv_heads)
            return shape.layers * self.lora_rank * query_and_value
        if self.last_layers is not None:
            return min(self.last_layers, shape.layers) * shape.layer_parameters
        return shape.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What runs at once: tokens in vLLM's cache, tokens of a micro-batch, tokens of a chunk of the head."""

    cached_tokens: int = 32 * 2048
    micro_batch_tokens: int = 2 * 2048
    chunk_tokens: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes on the GPU, and those asked of the host beside it."""

    served: float
    cache: float
    base_copy: float
    masters: float
    gradients: float
    states: float
    activations: float
    runtime: float
    host: float = 0.0

    @property
    def server(self) -> float:
        """What vLLM's share, `--gpu-memory-utilization`, has to hold."""
        return self.served + self.cache

    @property
    def total(self) -> float:
        trainer = self.base_copy + self.masters + self.gradients + self.states + self.activations
        return self.server + trainer + self.runtime


def budget(shape: ModelShape, setting: Setting, load: Load) -> Budget:
    """The bytes of one run: full weights through shared tensors, or an adapter beside a frozen base."""
    trained = setting.trained_parameters(shape)
    on_device, host = _trainer_bytes(trained, setting)
    activations = shape.hidden * load.micro_batch_tokens * SERVED_BYTES * shape.layers * KEPT_PER_LAYER
    activations += (WORKING_SET * shape.hidden + 3 * shape.intermediate) * load.micro_batch_tokens * SERVED_BYTES
    activations += LOGIT_COPIES * 4 * load.chunk_tokens * shape.vocabulary
    if setting.master_weights == "none":  # the step comes when the activations are gone
        activations = max(activations, 2.0 * 4 * max(ROUNDED_AT_ONCE, shape.vocabulary * shape.hidden))
    return Budget(
        served=SERVED_BYTES * shape.parameters,
        cache=shape.kv_bytes_per_token * load.cached_tokens,
        base_copy=SERVED_BYTES * shape.parameters if setting.lora_rank is not None else 0.0,
        masters=on_device[0],
        gradients=on_device[1],
        states=on_device[2],
        activations=activations,
        runtime=RUNTIME_BYTES,
        host=host,
    )


def _trainer_bytes(trained: int, setting: Setting) -> tuple[tuple[float, float, float], float]:
    """(masters, gradients, states) on the GPU, and the sum of what lies on the host instead."""
    states = OPTIMIZER_STATE_BYTES[setting.optimizer] * trained
    if setting.master_weights == "none":
        # Stochastic rounding is of the weights: the states keep the precision that they have beside fp32 masters.
        return (0.0, SERVED_BYTES * trained, states), 0.0
    if setting.master_weights == "host":
        return (0.0, 0.0, 0.0), 4 * trained + 4 * trained + states
    return (4 * trained, 4 * trained, states), 0.0
