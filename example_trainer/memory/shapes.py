"""The sizes of a model that the arithmetic of memory needs, read from its config.json on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_api.common.files import expand_home

CONFIG_FILE = "config.json"

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in config.json: those of Mixtral, of Qwen, of DeepSeek and GLM, and of Ernie."""

TIED_BY_DEFAULT = ("cohere", "ernie4_5", "gemma", "lfm2", "smollm3", "starcoder2")
"""First parts of the types of models whose output head is the embedding unless config.json says otherwise."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ADAPTED_BY_DEFAULT = ("q_proj", "v_proj")
ADAPTER_PRESETS = ("all-linear", "attention", "mlp")
"""Target sets by role, for any model family's module names; each covers only modules inside the blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder with gated feed-forward layers and grouped key-value heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    """Number of feed-forward blocks of a layer; `intermediate` is the size of one."""
    active_experts: int = 1
    """Number of feed-forward blocks that a token passes through."""
    stored_dtype: str = "bfloat16"
    """Name of the dtype of the checkpoint's weights, in which `--dtype auto` serves them."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of a weight in the checkpoint; those of float32 for a dtype that is not served."""
        return DTYPE_BYTES.get(self.stored_dtype, DTYPE_BYTES["float32"])

    @property
    def linear(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of each linear module of a layer, under the usual names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in the linear modules of a layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.experts * 3 * self.hidden * self.intermediate

    @property
    def packed_parameters(self) -> int:
        """Number of parameters of a layer that a base in 4 bits packs: experts, which are one tensor, are not."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.matrix_parameters if self.experts == 1 else attention

    @property
    def layer_parameters(self) -> int:
        router = self.experts * self.hidden if self.experts > 1 else 0
        return self.matrix_parameters + router + 2 * self.hidden

    @property
    def end_parameters(self) -> int:
        """Number of parameters of embedding and output head, which are one matrix if they are tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.end_parameters + self.hidden

    def cache_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Return the bytes of keys and values that vLLM keeps for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


_REFERENCES = (
    # size, model, hidden, layers, heads, kv_heads, intermediate, vocabulary, tied
    ("8B", "Llama 3.1", 4096, 32, 32, 8, 14336, 128256, False),
    ("14B", "Qwen 2.5", 5120, 48, 40, 8, 13824, 152064, False),
    ("24B", "Mistral Small", 5120, 40, 32, 8, 32768, 131072, False),
    ("3B", "Llama 3.2", 3072, 28, 24, 8, 8192, 128256, True),
    ("4B", "Qwen 3", 2560, 36, 32, 8, 9728, 151936, True),
    ("7B", "Qwen 2.5", 3584, 28, 28, 4, 18944, 152064, False),
)
REFERENCE_SHAPES: Mapping[str, ModelShape] = {
    size: ModelShape(
        name=f"{size} ({model}'s shape)",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=tied,
    )
    for size, model, hidden, layers, heads, kv_heads, intermediate, vocabulary, tied in _REFERENCES
}


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a Hugging Face `config.json` describes; `KeyError` names a field it lacks."""
    text = config.get("text_config", config)
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    experts = int(next((count for name in EXPERTS if (count := text.get(name))), 1))
    usually_tied = str(text.get("model_type")).startswith(TIED_BY_DEFAULT)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32")
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        intermediate=int((experts > 1 and text.get("moe_intermediate_size")) or text["intermediate_size"]),
        vocabulary=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", usually_tied))),
        experts=experts,
        active_experts=int(text.get("num_experts_per_tok") or 1),
        stored_dtype=dtype.removeprefix("torch."),
    )


def find_file(name: str, file: str) -> Path | None:
    """Return the path of a file of a model: in its directory, or if it is in the local cache of Hugging Face ids."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    directory = expand_home(name)
    if directory.is_dir():
        return directory / file
    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def local_shape(name: str) -> ModelShape | None:
    """Return the shape of a model on this machine; None if it is not here or is not a decoder of the usual form."""
    path = find_file(name, CONFIG_FILE)
    if path is None:
        return None
    try:
        return shape_of(name, json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, ValueError, TypeError, AttributeError, OSError):
        return None
