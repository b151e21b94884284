"""Computes the GPU memory of a training run from the model's shape alone: pure arithmetic, nothing measured, no torch.

Shared mode: the served weights exist once, inside vLLM's share of the GPU, and the trainer adds masters, gradients,
optimizer states and activations. Adapter modes: trainer and vLLM each hold the frozen base.

`atropos doctor --memory MODEL` prints this arithmetic for each setting and says which fit a GPU. It advises the first
that fits: it tries cheaper optimizer states first, then no fp32 masters, masters on the host, fewer layers, and an
adapter last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from example_trainer.errors import ModelNotFound

SERVED_BYTES = 2
"""Bytes of a served weight, which is bf16."""

OPTIMIZER_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.02}
"""Bytes per trained parameter without its master: two fp32 moments, two of a byte, or a row and a column per matrix."""

RUNTIME_BYTES = 3 * 2**30
"""Bytes of two CUDA contexts, vLLM's graphs and workspaces, and the trainer's allocator slack."""

KEPT_PER_LAYER = 1.0
"""Values per token that each layer keeps with activation checkpointing, in hidden sizes: its input."""

WORKING_SET = 18.0
"""Values per token that one recomputed layer holds, in hidden sizes; three intermediate sizes are added to them."""

ROUNDED_AT_ONCE = 1 << 24
"""Weights that stochastic rounding holds in fp32 at one time, with their gradients; a larger tensor is held whole."""

LOGIT_COPIES = 3
"""Number of fp32 arrays of the size chunk x vocabulary that the chunked head holds at its peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that the arithmetic needs, of a decoder with gated feed-forward and grouped key-value heads."""

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
    """Return the shape that a Hugging Face `config.json` describes; `KeyError` names a field it lacks."""
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
    """One way to train; `flags` returns it as flags of the trainer."""

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
    """The tokens that are held at once: in vLLM's cache, in a micro-batch, and in a chunk of the head."""

    cached_tokens: int = 32 * 2048
    micro_batch_tokens: int = 2 * 2048
    chunk_tokens: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bytes that a run needs on the GPU, by purpose, and those that it needs on the host (`host`)."""

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
        """Bytes that vLLM's share, `--gpu-memory-utilization`, has to hold."""
        return self.served + self.cache

    @property
    def total(self) -> float:
        trainer = self.base_copy + self.masters + self.gradients + self.states + self.activations
        return self.server + trainer + self.runtime


def budget(shape: ModelShape, setting: Setting, load: Load) -> Budget:
    """Compute the bytes of one run: full weights through shared tensors, or an adapter on a frozen base."""
    trained = setting.trained_parameters(shape)
    on_device, host = _trainer_bytes(trained, setting)
    activations = shape.hidden * load.micro_batch_tokens * SERVED_BYTES * shape.layers * KEPT_PER_LAYER
    activations += (WORKING_SET * shape.hidden + 3 * shape.intermediate) * load.micro_batch_tokens * SERVED_BYTES
    activations += LOGIT_COPIES * 4 * load.chunk_tokens * shape.vocabulary
    if setting.master_weights == "none":  # the optimizer's step runs after the activations are freed
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
    """Return (masters, gradients, states) on the GPU, and the sum of those that are on the host instead."""
    states = OPTIMIZER_STATE_BYTES[setting.optimizer] * trained
    if setting.master_weights == "none":
        # Only the weights are rounded stochastically: the states keep the precision that they have with fp32 masters.
        return (0.0, SERVED_BYTES * trained, states), 0.0
    if setting.master_weights == "host":
        return (0.0, 0.0, 0.0), 4 * trained + 4 * trained + states
    return (4 * trained, 4 * trained, states), 0.0


USABLE_FRACTION = 0.97
"""Share of the GPU's memory that can be used: the driver keeps a little, and allocators do not fill it to the byte."""

SETTINGS: Sequence[Setting] = (
    Setting(optimizer="adamw"),
    Setting(optimizer="adamw_8bit"),
    Setting(optimizer="adafactor"),
    Setting(optimizer="adamw_8bit", master_weights="none"),
    Setting(optimizer="adafactor", master_weights="none"),
    Setting(optimizer="adamw", master_weights="host"),
    Setting(optimizer="adamw", last_layers=12),
    Setting(optimizer="adamw_8bit", last_layers=12),
    Setting(optimizer="adamw", lora_rank=16),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentedRow:
    """A row of the published table of recommended settings: it names model, GPU memory, optimizer and utilization."""

    model: str
    gpu_gb: float
    optimizer: str
    utilization: float


DOCUMENTED_ROWS: Sequence[DocumentedRow] = (
    DocumentedRow(model="8B", gpu_gb=80, optimizer="adamw", utilization=0.5),
    DocumentedRow(model="14B", gpu_gb=80, optimizer="adamw_8bit", utilization=0.45),
    DocumentedRow(model="24B", gpu_gb=192, optimizer="adafactor", utilization=0.30),
)


class MemoryOptions(BaseModel):
    """The arguments of `atropos doctor`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    memory: str | None = Field(
        None,
        description="Show the settings that fit for this model: 8B, 14B, 24B, a model directory or a Hugging Face id; "
        "table: the documented rows.",
    )
    layers: str | None = Field(
        None,
        description="Show the numbers that --train-layer-indices and --lora-layer-indices take for this model: a "
        "directory or a Hugging Face id.",
    )
    gpu_gb: float = Field(80.0, gt=0.0, description="Memory of the GPU in GB (10^9 bytes).")
    cached_tokens: int = Field(Load().cached_tokens, ge=1, description="Tokens that vLLM's cache must hold at once.")
    batch_size: int = Field(2, ge=1, description="Sequences of a micro-batch.")
    seq_len: int = Field(2048, ge=2, description="Longest sequence in tokens.")

    @property
    def load(self) -> Load:
        return Load(cached_tokens=self.cached_tokens, micro_batch_tokens=self.batch_size * self.seq_len)


def advise(options: MemoryOptions) -> Iterator[str]:
    """Yield the lines of the report."""
    if options.memory == "table":
        for row in DOCUMENTED_ROWS:
            yield from _advise_row(row, options.load)
            yield ""
        return
    yield from _advise_model(find_shape(options.memory or "8B"), options.gpu_gb, options.load)


def find_shape(name: str) -> ModelShape:
    """Return the shape for a size, a directory or a Hugging Face id that is in the local cache."""
    if name.upper() in REFERENCE_SHAPES:
        return REFERENCE_SHAPES[name.upper()]
    path = config_path(name, flag="--memory")
    try:
        return shape_of(name, json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, ValueError, OSError) as error:
        raise ModelNotFound(f"--memory {name}: {path} does not describe a decoder ({error})") from None


def config_path(name: str, *, flag: str) -> Path:
    """Return the path of the config.json of a directory, or of a Hugging Face id in the local cache."""
    return Path(name) / "config.json" if Path(name).is_dir() else _cached_config(name, flag)


def nearest_fit(shape: ModelShape, gpu_gb: float, load: Load) -> Setting | None:
    """Return the first of `SETTINGS`, from most exact to cheapest, that fits; None if none does."""
    return next((setting for setting in SETTINGS if fits(budget(shape, setting, load), gpu_gb)), None)


def fits(needed: Budget, gpu_gb: float) -> bool:
    return needed.total <= gpu_gb * 1e9 * USABLE_FRACTION


def _advise_model(shape: ModelShape, gpu_gb: float, load: Load) -> Iterator[str]:
    yield f"{shape.name}: {shape.parameters / 1e9:.2f}B parameters on a GPU of {gpu_gb:g} GB"
    yield (
        f"cache of {load.cached_tokens} tokens at {shape.kv_bytes_per_token / 1024:.0f} KiB each; "
        f"micro-batches of {load.micro_batch_tokens} tokens, activation checkpointing on"
    )
    yield "  served  cache   base masters  grads states   act.  other =  total    host  GB"
    for setting in SETTINGS:
        yield from _line(shape, setting, gpu_gb, load)
    best = nearest_fit(shape, gpu_gb, load)
    if best is None:
        yield "nothing fits: take a larger GPU, several of them, or fewer cached tokens (--cached-tokens)"
        return
    share = budget(shape, best, load).server / (gpu_gb * 1e9)
    yield f"take: {best.flags} --gradient-checkpointing --gpu-memory-utilization {share + 0.02:.2f}"


def _line(shape: ModelShape, setting: Setting, gpu_gb: float, load: Load) -> Iterator[str]:
    needed = budget(shape, setting, load)
    parts = (
        needed.served,
        needed.cache,
        needed.base_copy,
        needed.masters,
        needed.gradients,
        needed.states,
        needed.activations,
        needed.runtime,
    )
    columns = " ".join(f"{part / 1e9:6.1f}" for part in parts)
    verdict = "fits" if fits(needed, gpu_gb) else "does not fit"
    yield f"  {columns} = {needed.total / 1e9:6.1f}  {needed.host / 1e9:6.1f}  {verdict}: {setting.flags}"


def _advise_row(row: DocumentedRow, load: Load) -> Iterator[str]:
    shape = REFERENCE_SHAPES[row.model]
    documented_setting = next(setting for setting in SETTINGS if setting.optimizer == row.optimizer)
    needed = budget(shape, documented_setting, load)
    yield from _advise_model(shape, row.gpu_gb, load)
    documented = (
        f"documented: {row.model} on {row.gpu_gb:g} GB with {row.optimizer} and --gpu-memory-utilization "
        f"{row.utilization}"
    )
    if fits(needed, row.gpu_gb):
        yield f"{documented}: fits with fp32 masters"
        return
    over = needed.total / 1e9 - row.gpu_gb
    yield f"{documented}: with fp32 masters for all layers it is {over:.0f} GB over; the nearest fit is shown above"


def _cached_config(name: str, flag: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelNotFound(f"{flag} {name}: neither a directory nor a Hugging Face id ({error})") from None
    if not isinstance(found, str):
        sizes = f"not one of the sizes {', '.join(REFERENCE_SHAPES)}, " if flag == "--memory" else ""
        raise ModelNotFound(
            f"{flag} {name}: {sizes}not a directory, and not in the "
            f"local Hugging Face cache; hf download {name} config.json brings it there"
        )
    return Path(found)
