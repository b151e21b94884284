"""The check before anything is loaded: it refuses a run that does not fit its GPU, or chooses flags that do.

Trainer and launcher ask it. It takes no more than the time to start nvidia-smi and read a config.json, and says nothing
without a GPU (unless `--gpu-memory-gb` names one) or without the model's config.json on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil

from example_trainer.errors import DoesNotFit
from example_trainer.memory.fit import (
    GB,
    Card,
    Changes,
    ServerShares,
    as_flags,
    budget_on,
    card_after,
    explain,
    least_share,
    nearest,
    with_changes,
)
from example_trainer.memory.shapes import ModelShape, local_shape
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.ports import THIS_HOST
from example_trainer.processes.tree import gpu_memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The flags that `--fit auto` chose: none if the run fits as it is, if nothing is known, or under another value."""

    changes: Changes = field(default_factory=dict)
    sentence: str | None = None
    """A line for the log; None unless `--fit auto` had something to decide."""


def preflight(
    config: TrainingOptions,
    *,
    starts_server: bool,
    servers: ServerShares | None = None,
    environment: Mapping[str, str] | None = None,
) -> Choice:
    """Raise `DoesNotFit` if a run does not fit its GPU; under `--fit auto` return the changes with which it does.

    `starts_server` says if this configuration's settings are those that the inference server will be started with;
    `servers` says how the servers on the trainer's GPU divide its memory, if there is more than one.
    """
    if config.fit == "off":
        return Choice()
    environment = os.environ if environment is None else environment
    gpu = trainer_gpu(config)
    total_bytes = card_bytes(config, gpu)
    shape = None if total_bytes is None else local_shape(config.model_name)
    if total_bytes is None or shape is None:
        return Choice()
    shares_gpu = serves_on(gpu, config, environment)
    card = card_of(shape, config, total_bytes, shares_gpu=shares_gpu, starts_server=starts_server)
    if servers is not None:
        card = replace(card, servers=servers)
    found = nearest(shape, config, card) if config.fit == "auto" else None
    if found is None:
        if reason := explain(shape, config, card):
            raise DoesNotFit(reason)
        return Choice()
    needed = budget_on(shape, with_changes(config, found), card_after(found, card))
    said = as_flags(found) or "no flag, since it fits as it is"
    of = f"{needed.total / GB:.1f} of {total_bytes / GB:.1f} GB on the GPU"
    return Choice(changes=found, sentence=f"--fit auto chose {said} ({of})")


def trainer_gpu(config: TrainingOptions) -> int:
    """Return the number of the trainer's GPU among those that this process sees.

    Of several ranks it is the first one's, which vLLM may share: each rank asks before they meet, and has to train in
    the same way as the others.
    """
    _, colon, index = config.device.partition(":")
    return int(index) if colon and index.isdecimal() else 0


def card_bytes(config: TrainingOptions, gpu: int) -> float | None:
    """Return the memory of the trainer's GPU: what `--gpu-memory-gb` says, else what the driver does; None if none."""
    if config.gpu_memory_gb is not None:
        return config.gpu_memory_gb * GB
    return None if config.device == "cpu" else gpu_memory_bytes(gpu)


def serves_on(gpu: int, config: TrainingOptions, environment: Mapping[str, str]) -> bool:
    """Return True if vLLM serves from the GPU with this number among those that this process sees."""
    if config.shares_memory:
        return True
    if config.vllm_host not in THIS_HOST or config.inference_urls:
        return False
    return is_given(gpu, None if config.vllm_gpu is None else str(config.vllm_gpu), environment)


def is_given(gpu: int, named: str | None, environment: Mapping[str, str]) -> bool:
    """Return True if a server that is given the GPUs `named` has the one with this number among those that we see.

    `named` counts the machine's GPUs, several with commas between them; a server without it takes the first it sees.
    """
    if named is None:
        return gpu == 0
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    here = visible[gpu] if gpu < len(visible) else str(gpu)
    return here in [name.strip() for name in named.split(",")]


def card_of(
    shape: ModelShape, config: TrainingOptions, total_bytes: float, *, shares_gpu: bool, starts_server: bool
) -> Card:
    """Return the trainer's GPU with vLLM's share of it.

    The share of a server that somebody else starts is known only if `--gpu-memory-utilization` tells it. If not, it is
    taken to be the smallest that can serve, so that no run is refused that might fit.
    """
    host_bytes = float(psutil.virtual_memory().total) if config.gpu_memory_gb is None else None
    share = config.gpu_memory_utilization
    if not shares_gpu:
        share = 0.0
    elif not starts_server and "gpu_memory_utilization" not in config.model_fields_set:
        share = least_share(shape, config, total_bytes) if config.shares_memory else 0.0
    return Card(total_bytes=total_bytes, share=share, share_can_change=starts_server, host_bytes=host_bytes)
