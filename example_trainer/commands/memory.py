"""`atropos doctor --memory MODEL` prints what each setting needs and which fit a GPU; `memory_page` is the docs' page.

All numbers come from `example_trainer.memory`, with which trainer and launcher decide before a run; none is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.common.cliconfig import read_config_file
from example_trainer.config import TrainingConfig
from example_trainer.errors import ModelNotFound
from example_trainer.memory.budget import (
    FOUR_BIT_BYTES,
    LAYER_GRADIENTS,
    OPTIMIZER_STATE_BYTES,
    RUNTIME_BYTES,
    SERVER_WORKSPACE_BYTES,
    WORKING_SET,
    Budget,
    budget,
    server_needs,
)
from example_trainer.memory.fit import (
    CACHED_SEQUENCES,
    GB,
    OF_FULL_WEIGHTS,
    USABLE_FRACTION,
    Changes,
    Gpu,
    as_flags,
    budget_on,
    fits,
    gpu_after,
    nearest,
    with_changes,
)
from example_trainer.memory.shapes import CONFIG_FILE, REFERENCE_SHAPES, ModelShape, find_file, shape_of
from example_trainer.processes.tree import PACKAGE_ROOT

CACHED_TOKENS = 32 * 2048
TOP_BLOCK_COUNT = 12
TOP_BLOCKS = f"last-{TOP_BLOCK_COUNT}"

SETTINGS: Sequence[Changes] = (
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw_8bit"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adafactor"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw_8bit", "master_weights": "none"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adafactor", "master_weights": "none"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw", "master_weights": "host"},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw", "train_layer_indices": TOP_BLOCKS},
    {"weight_bridge_mode": "shared_vllm", "optimizer": "adamw_8bit", "train_layer_indices": TOP_BLOCKS},
    {"weight_bridge_mode": "lora_only", "optimizer": "adamw"},
    {"weight_bridge_mode": "lora_restart", "optimizer": "adamw", "load_in_4bit": True},
)
"""The settings that the report compares, from most exact to cheapest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the page: a model on a GPU, and the flags to judge."""

    model: str
    gpu_gb: float
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(model_name=self.model, **self.flags)

    @property
    def gpu(self) -> Gpu:
        share = 0.0 if self.config.vllm_gpu else self.config.gpu_memory_utilization
        return Gpu(total_bytes=self.gpu_gb * GB, share=share)


_SHARED = {"weight_bridge_mode": "shared_vllm"}
DOCUMENTED_ROWS: Sequence[Row] = (
    Row(model="8B", gpu_gb=80, flags={**_SHARED, "optimizer": "adamw", "gpu_memory_utilization": 0.5}),
    Row(
        model="14B",
        gpu_gb=80,
        flags={**_SHARED, "optimizer": "adamw_8bit", "gpu_memory_utilization": 0.45, "batch_size": 2},
    ),
    Row(model="24B", gpu_gb=192, flags={**_SHARED, "optimizer": "adafactor", "gpu_memory_utilization": 0.3}),
)
"""The rows of the published table of settings."""

OTHER_ROWS: Sequence[Row] = (
    Row(model="8B", gpu_gb=80, flags={"weight_bridge_mode": "none"}),
    Row(model="8B", gpu_gb=80, flags={"weight_bridge_mode": "lora_restart"}),
    Row(model="8B", gpu_gb=48, flags={"weight_bridge_mode": "lora_only"}),
    Row(model="14B", gpu_gb=141, flags=_SHARED),
    Row(model="24B", gpu_gb=141, flags=_SHARED),
)
_FOUR_BITS = {"weight_bridge_mode": "lora_restart", "load_in_4bit": True}
FOUR_BIT_CLAIM = Row(model="7B", gpu_gb=9, flags={**_FOUR_BITS, "vllm_gpu": 1})
"""A published guide gives less than 9 GB for a 7B model in 4 bits."""
FOUR_BIT_ROWS = (FOUR_BIT_CLAIM, Row(model="7B", gpu_gb=40, flags=_FOUR_BITS))

MODELS_OF_RUN_FILES = {"NousResearch/DeepHermes-3-Llama-3-3B-Preview": "3B", "Qwen/Qwen3-4B-Instruct-2507": "4B"}


PAGE = """\
# GPU memory

`python -m example_trainer.commands.generate_docs memory` prints this page from the arithmetic by which trainer and
launcher decide. `make gpu` compares it with [a step's peak](../explanation/gpu.md). GB are 10^9 bytes.
<!-- gpu: memory-kept-activations memory-checkpointed memory-offloaded -->

## Before a run

`atropos-grpo`, `atropos-grpo-run` and `atropos-sft` compute what a run needs before they load anything. `--fit check` (the default)
refuses a run that does not fit, in one line with the nearest flags that do and exit code 2. `--fit auto` sets these
flags and logs them. `--fit off` does neither. The memory is that of the trainer's GPU as `nvidia-smi` gives it;
`--gpu-memory-gb 80` counts with another. Without a GPU, or if the model's `config.json` is neither in a directory nor
in the local Hugging Face cache, nothing is checked.

Flags are tried in this order, and the first that fit are taken:

1. those that alter no result: none, `--gradient-checkpointing` (about a third more time), with it a smaller
   `--token-budget`, down to one sequence of `--seq-len`; then the same with another `--gpu-memory-utilization`, which
   leaves vLLM a cache of at least {sequences} sequences of `--max-model-len`, if this command starts the server;
2. for full weights the same with each of: {weights};
3. flags that train something else are only suggested, and only if all of the above is not enough:
   `--train-layer-indices last-12`, an adapter, an adapter on a base in 4 bits.

The trainer knows the share of a server that is started elsewhere only from `--gpu-memory-utilization`; without the flag
it counts, in `shared_vllm`, the least that can serve, and in `lora_only` nothing.

## What counts

| part | bytes |
|---|---|
| vLLM's share | `--gpu-memory-utilization` of the GPU; 0 if `--vllm-gpu` or `--vllm-host` name another. It has to hold the weights, the cache and a workspace, for which {workspace:.1f} GB are reserved where the share is chosen |
| the teacher's share | what the server of a teacher takes of the same GPU, if the launcher starts it there: its own `--teacher.vllm.gpu_memory_utilization`, or with `--teacher.gpu` as much again as the policy's; else the policy's share is that of both, divided evenly |
| weights | `shared_vllm`: none, or {served} per trained parameter if the forward reads the masters; other modes: {served} per parameter; with `--load-in-4bit` {four_bit} per parameter of the linear layers; several ranks: two gathered layers, embedding and head, each divided by `--trainer-tensor-parallel-size`, with which the whole head is held once more |
| masters, gradients | 4 and 4 per trained parameter; `--master-weights none`: {served} for the gradients; `host`: in host memory, and there 2 more for the gradients as they arrive |
| optimizer states, per trained parameter | {states} |
| activations, per token of a micro-batch and layer | {hidden:g} hidden sizes and {intermediate:g} intermediate sizes of {served} bytes; with `--gradient-checkpointing` one hidden size a layer, and the former for one layer; in either case {gradients:g} more intermediate sizes for the layer whose backward runs; `--trainer-tensor-parallel-size` divides the intermediate sizes |
| head | three fp32 arrays of a chunk of logits, and two of the output matrix if it is trained |
| copies | {served} per trained parameter for a reference policy (`--kl-coef`) and each of `--keep-versions` |
| runtime | {runtime:.1f} GB for each of the processes on the GPU |

A micro-batch holds `--batch-size` x `--seq-len` tokens, or `--token-budget`. Several ranks divide masters, gradients
and states of full weights. {usable:.0%} of a GPU count as usable.

## The cache of a shared GPU

A server that shares its GPU with the trainer, or with another server that the launcher starts, gets the size of its KV
cache in bytes (vLLM's `--kv-cache-memory-bytes`): its share without the weights, the adapters and {workspace:.1f} GB of
workspace, on each of its tensor-parallel ranks. Without this size vLLM measures free memory while it starts, and makes
the cache smaller by whatever another process allocates on the GPU meanwhile. The size is left to vLLM if the rest of the
share would hold no sequence of `--max-model-len`, if the GPU's memory or the model's `config.json` is not known here, or
if the server's own settings (`vllm:` in a run file) change its share, dtype, quantisation, ranks or adapters. Tests do
this arithmetic with a simulated driver; no server has been started with it on a GPU yet.

## The published table

The flags are those of the published table of settings, with micro-batches of two sequences of 2,048 tokens. The flags
of the column "fits with" are added to them, or replace them.

{documented}

## Others

{others}

## A base in 4 bits

{four_bit_table}

The quantised base takes {four_bit_base:.1f} GB. The published figure for a 7B model in 4 bits, less than {claim:g} GB,
{verdict}.
vLLM serves the base in bf16, which takes {served_base:.1f} GB more, on the same GPU or on another.

## The run files

Each file in `configs/` names the GPU that it is for; `demo.yaml` needs none.

{run_files}

`atropos doctor --memory MODEL` prints the parts for each setting of a model: a size of these tables, a directory or a
Hugging Face id.
"""  # noqa: E501 - a row of a table is one line


class MemoryOptions(BaseModel):
    """The arguments of `atropos doctor`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    memory: str | None = Field(
        None,
        description="Show the settings that fit for this model: 3B, 4B, 7B, 8B, 14B, 24B, a model directory or a "
        "Hugging Face id; table: the documented rows.",
    )
    layers: str | None = Field(
        None,
        description="Show the numbers that --train-layer-indices and --lora-layer-indices take for this model: a "
        "directory or a Hugging Face id.",
    )
    gpu_gb: float = Field(80.0, gt=0.0, description="Memory of the GPU in GB (10^9 bytes).")
    cached_tokens: int = Field(CACHED_TOKENS, ge=1, description="Tokens that vLLM's cache must hold at once.")
    batch_size: int = Field(2, ge=1, description="Sequences of a micro-batch.")
    seq_len: int = Field(2048, ge=2, description="Longest sequence in tokens.")


def advise(options: MemoryOptions) -> Iterator[str]:
    """Yield the lines of the report."""
    if options.memory == "table":
        yield from table_of((*DOCUMENTED_ROWS, *OTHER_ROWS, *FOUR_BIT_ROWS))
        return
    shape = find_shape(options.memory or "8B")
    yield f"{shape.name}: {shape.parameters / GB:.2f}B parameters on a GPU of {options.gpu_gb:g} GB"
    yield (
        f"cache of {options.cached_tokens} tokens at {shape.cache_bytes_per_token() / 1024:.0f} KiB each; "
        f"micro-batches of {options.batch_size * options.seq_len} tokens, activation checkpointing on"
    )
    yield "  server   base masters  grads states   act.  other =  total    host  GB"
    first = None
    for setting in SETTINGS:
        if "train_layer_indices" in setting and shape.layers <= TOP_BLOCK_COUNT:
            continue  # a model this small has no blocks below the top ones
        config = with_changes(_base_config(shape, options), setting)
        needed = budget(shape, config, server_bytes=server_needs(shape, config, cached_tokens=options.cached_tokens))
        fit = needed.total <= options.gpu_gb * GB * USABLE_FRACTION
        yield f"  {_columns(needed)}  {'fits' if fit else 'does not fit'}: {as_flags(setting)}"
        first = first or (f"take: {_command(setting, needed, options)}" if fit else None)
    yield first or "nothing fits: take a larger GPU, several of them, or fewer cached tokens (--cached-tokens)"


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
    if (path := find_file(name, CONFIG_FILE)) is not None:
        return path
    if name.startswith(("/", ".", "~")) or Path(name).is_dir():
        raise ModelNotFound(
            f"{flag} {name}: no directory with a {CONFIG_FILE}; name a model's folder, or its id on the hub"
        )
    sizes = f"not one of the sizes {', '.join(REFERENCE_SHAPES)}, " if flag == "--memory" else ""
    raise ModelNotFound(
        f"{flag} {name}: {sizes}not a directory, and not in the local Hugging Face cache; "
        f"hf download {name} config.json brings it there"
    )


def run_file_row(path: Path) -> Row | None:
    """Return the model, GPU and flags of a run file whose first lines name a GPU; None if they do not."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"^#.*\bGPU of (\d+) GB", text, re.MULTILINE)
    settings = read_config_file(TrainingConfig, str(path), section="trainer")
    if found is None:
        return None
    flags = {name: value for name, value in settings.items() if name != "model_name"}
    return Row(model=MODELS_OF_RUN_FILES[settings["model_name"]], gpu_gb=float(found[1]), flags=flags)


def table_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table: the memory that each row needs, and the nearest flags with which it fits."""
    yield "| model | GPU | flags | needs | fits with | needs then | host memory |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        shape, config, gpu = REFERENCE_SHAPES[row.model], row.config, row.gpu
        changes = nearest(shape, config, gpu)
        before = budget_on(shape, config, gpu).total / GB
        asked = f"| {shape.name} | {row.gpu_gb:g} GB | `{as_flags(row.flags)}` | {before:.1f} GB |"
        if changes is None:
            yield f"{asked} none | | |"
            continue
        after = budget_on(shape, with_changes(config, changes), gpu_after(changes, gpu))
        flags = f"`{as_flags(changes)}`" if changes else "it fits as it is"
        host = f"{after.host / GB:.0f} GB" if after.host else ""
        yield f"{asked} {flags} | {after.total / GB:.1f} GB | {host} |"


def memory_page() -> str:
    """Return the text of docs/reference/memory.md."""
    quantised = REFERENCE_SHAPES[FOUR_BIT_CLAIM.model]
    files = sorted((PACKAGE_ROOT / "configs").glob("*.yaml"))
    named = {path.name: found for path in files if (found := run_file_row(path)) is not None}
    return PAGE.format(
        sequences=CACHED_SEQUENCES,
        weights=", ".join(f"`{as_flags(setting)}`" for setting in OF_FULL_WEIGHTS if setting),
        workspace=SERVER_WORKSPACE_BYTES / GB,
        served="2",
        four_bit=FOUR_BIT_BYTES,
        states=", ".join(f"`{name}` {count:g}" for name, count in OPTIMIZER_STATE_BYTES.items()),
        hidden=WORKING_SET[0],
        intermediate=WORKING_SET[1],
        gradients=LAYER_GRADIENTS,
        runtime=RUNTIME_BYTES / GB,
        usable=USABLE_FRACTION,
        documented="\n".join(table_of(DOCUMENTED_ROWS)),
        others="\n".join(table_of(OTHER_ROWS)),
        four_bit_table="\n".join(table_of(FOUR_BIT_ROWS)),
        four_bit_base=budget_on(quantised, FOUR_BIT_CLAIM.config, FOUR_BIT_CLAIM.gpu).weights / GB,
        served_base=2 * quantised.parameters / GB,
        claim=FOUR_BIT_CLAIM.gpu_gb,
        verdict=_verdict(quantised, FOUR_BIT_CLAIM),
        run_files="\n".join(_run_file_table(named)),
    )


def _verdict(shape: ModelShape, row: Row) -> str:
    """Return the end of the sentence that says if the published figure of a row holds."""
    changes = nearest(shape, row.config, row.gpu)
    if changes is None:
        return "does not hold"
    needed = budget_on(shape, with_changes(row.config, changes), gpu_after(changes, row.gpu))
    return f"holds for the trainer with `{as_flags(changes)}` ({needed.total / GB:.1f} GB), not with vLLM beside it"


def _run_file_table(named: Mapping[str, Row]) -> Iterator[str]:
    yield "| file | model | GPU | needs | |"
    yield "|---|---|---|---|---|"
    for name, row in named.items():
        shape = REFERENCE_SHAPES[row.model]
        verdict = "fits" if fits(shape, row.config, row.gpu) else "does not fit"
        needed = budget_on(shape, row.config, row.gpu).total / GB
        yield f"| `{name}` | {shape.name} | {row.gpu_gb:g} GB | {needed:.1f} GB | {verdict} |"


def _base_config(shape: ModelShape, options: MemoryOptions) -> TrainingConfig:
    return TrainingConfig(
        model_name=shape.name, gradient_checkpointing=True, batch_size=options.batch_size, seq_len=options.seq_len
    )


def _columns(needed: Budget) -> str:
    parts = (needed.server, needed.weights, needed.masters, needed.gradients, needed.states)
    shown = " ".join(f"{part / GB:6.1f}" for part in (*parts, needed.working, needed.runtime))
    return f"{shown} = {needed.total / GB:6.1f}  {needed.host / GB:6.1f}"


def _command(setting: Changes, needed: Budget, options: MemoryOptions) -> str:
    share = needed.server / (options.gpu_gb * GB) + 0.005
    return f"{as_flags(setting)} --gradient-checkpointing --gpu-memory-utilization {share:.2f}"
