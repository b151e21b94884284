"""`atropos doctor --memory MODEL`: which settings fit a GPU, from arithmetic that it prints.

A run that does not fit is answered with the nearest one that does: cheaper optimizer states first, then no fp32
masters, masters on the host, fewer layers, and an adapter at last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from example_trainer.errors import ModelNotFound
from example_trainer.running.memory_model import (
    REFERENCE_SHAPES,
    Budget,
    Load,
    ModelShape,
    Setting,
    budget,
    shape_of,
)

USABLE_FRACTION = 0.97
"""The driver keeps a little, and allocators do not fill the rest to the byte."""

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
    """A row of the published table of recommended settings: model, card, what is recommended there."""

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
        description="Say which settings fit for this model: 8B, 14B, 24B, the directory of a model or its Hugging "
        "Face id; table: the documented rows.",
    )
    layers: str | None = Field(
        None,
        description="Say which numbers --train-layer-indices and --lora-layer-indices take for this model: its "
        "directory or its Hugging Face id.",
    )
    gpu_gb: float = Field(80.0, gt=0.0, description="Memory of the GPU in GB (10^9 bytes).")
    cached_tokens: int = Field(Load().cached_tokens, ge=1, description="Tokens that vLLM's cache is to hold at once.")
    batch_size: int = Field(2, ge=1, description="Sequences of a micro-batch.")
    seq_len: int = Field(2048, ge=2, description="Longest sequence in tokens.")

    @property
    def load(self) -> Load:
        return Load(cached_tokens=self.cached_tokens, micro_batch_tokens=self.batch_size * self.seq_len)


def advise(options: MemoryOptions) -> Iterator[str]:
    """The lines of the report."""
    if options.memory == "table":
        for row in DOCUMENTED_ROWS:
            yield from _advise_row(row, options.load)
            yield ""
        return
    yield from _advise_model(find_shape(options.memory or "8B"), options.gpu_gb, options.load)


def find_shape(name: str) -> ModelShape:
    """The shape behind a size, a directory or a Hugging Face id that is in the local cache."""
    if name.upper() in REFERENCE_SHAPES:
        return REFERENCE_SHAPES[name.upper()]
    path = config_path(name, flag="--memory")
    try:
        return shape_of(name, json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, ValueError, OSError) as error:
        raise ModelNotFound(f"--memory {name}: {path} does not describe a decoder ({error})") from None


def config_path(name: str, *, flag: str) -> Path:
    """Where the config.json of a directory lies, or of a Hugging Face id in the local cache."""
    return Path(name) / "config.json" if Path(name).is_dir() else _cached_config(name, flag)


def nearest_fit(shape: ModelShape, gpu_gb: float, load: Load) -> Setting | None:
    """The first of `SETTINGS`, from most exact to cheapest, that fits."""
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
    asked = next(setting for setting in SETTINGS if setting.optimizer == row.optimizer)
    needed = budget(shape, asked, load)
    yield from _advise_model(shape, row.gpu_gb, load)
    documented = (
        f"documented: {row.model} on {row.gpu_gb:g} GB with {row.optimizer} and --gpu-memory-utilization "
        f"{row.utilization}"
    )
    if fits(needed, row.gpu_gb):
        yield f"{documented}: fits with fp32 masters"
        return
    over = needed.total / 1e9 - row.gpu_gb
    yield f"{documented}: with fp32 masters for all layers it is {over:.0f} GB over; the nearest that fits stands above"


def _cached_config(name: str, flag: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelNotFound(f"{flag} {name}: not a directory, not a Hugging Face id ({error})") from None
    if not isinstance(found, str):
        sizes = f"not one of the sizes {', '.join(REFERENCE_SHAPES)}, " if flag == "--memory" else ""
        raise ModelNotFound(
            f"{flag} {name}: {sizes}not a directory, and not in the "
            f"local Hugging Face cache; hf download {name} config.json brings it there"
        )
    return Path(found)
