"""The check before anything is loaded: it refuses a run that does not fit its GPU, or chooses flags that do.

Trainer and launcher ask it. It takes no more than the time to start nvidia-smi and read a config.json, and says nothing
without a GPU (unless `--gpu-memory-gb` names one) or without the model's config.json on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil

from atropos_api.common.control_groups import memory_limit_bytes
from example_trainer.errors import DoesNotFit
from example_trainer.memory.budget import RUNTIME_BYTES, server_cache
from example_trainer.memory.fit import (
    GB,
    USABLE_FRACTION,
    Changes,
    Gpu,
    ServerShares,
    as_flags,
    budget_on,
    explain,
    gpu_after,
    least_share,
    nearest,
    with_changes,
)
from example_trainer.memory.shapes import ModelShape, local_shape
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.gpus import gpu_memory_bytes, gpu_names, serves_from_gpu, visible_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The flags that `--fit auto` chose: none if the run fits as it is, if nothing is known, or without `auto`."""

    changes: Changes = field(default_factory=dict)
    sentence: str | None = None
    """A line for the log; None unless `--fit auto` had something to decide."""


def preflight(
    config: TrainingOptions,
    *,
    starts_server: bool,
    servers: ServerShares | None = None,
    program: str = "atropos-grpo",
) -> Choice:
    """Raise `DoesNotFit` if a run does not fit its GPU; under `--fit auto` return the changes with which it does.

    `starts_server` says if this configuration's settings are those that the inference server will be started with;
    `servers` says how the servers on the trainer's GPU divide its memory, if there is more than one. `atropos-sft` is a
    `program` without a server.
    """
    if config.fit == "off":
        return Choice()
    gpu_index = trainer_gpu(config)
    total_bytes = gpu_bytes(config, gpu_index)
    shape = None if total_bytes is None else local_shape(config.model_name)
    if total_bytes is None or shape is None:
        return Choice()
    shares_gpu = program != "atropos-sft" and serves_on(gpu_index, config, os.environ)
    gpu = gpu_of(shape, config, total_bytes, shares_gpu=shares_gpu, starts_server=starts_server)
    gpu = replace(gpu, program=program)
    if servers is not None:
        gpu = replace(gpu, servers=servers)
    found = nearest(shape, config, gpu) if config.fit == "auto" else None
    if found is None:
        if reason := explain(shape, config, gpu):
            raise DoesNotFit(reason)
        return Choice()
    needed = budget_on(shape, with_changes(config, found), gpu_after(found, gpu))
    said = as_flags(found) or "no flag, since it fits as it is"
    of = f"{needed.total / GB:.1f} of {total_bytes / GB:.1f} GB on the GPU"
    return Choice(changes=found, sentence=f"--fit auto chose {said} ({of})")


def cache_on_shared_gpu(
    config: TrainingOptions, *, share: float, beside_server: bool, environment: Mapping[str, str] | None = None
) -> int | None:
    """Return the bytes of KV cache for a server that has `share` of a GPU on which other processes allocate too.

    `beside_server` says if another server is one of them.

    By itself, vLLM gives its cache what a trial run leaves of the share. It measures the run by how much the GPU's free
    memory shrinks, so a trainer that loads its model meanwhile, or a second server, makes the cache smaller, until no
    block is left. None leaves it to vLLM: if the server has its GPU alone, or if GPU or model are not known here.
    """
    environment = os.environ if environment is None else environment
    beside_trainer = config.device != "cpu" and serves_on(trainer_gpu(config), config, environment)
    if not (beside_trainer or beside_server) or not serves_from_gpu(environment):
        return None
    total_bytes, shape = gpu_memory_bytes(config.vllm_gpu or 0), local_shape(config.model_name)
    if total_bytes is None or shape is None:
        return None
    most = total_bytes * USABLE_FRACTION - RUNTIME_BYTES
    cache = server_cache(shape, config, share_bytes=min(share * total_bytes, most))
    return None if cache is None else int(cache)


def trainer_gpu(config: TrainingOptions) -> int:
    """Return the number of the trainer's GPU among those that this process sees.

    Of several ranks it is the first one's, which vLLM may share: each rank asks before they meet, and has to train in
    the same way as the others.
    """
    _, colon, index = config.device.partition(":")
    return int(index) if colon and index.isdecimal() else 0


def gpu_bytes(config: TrainingOptions, gpu_index: int) -> float | None:
    """Return the memory of the trainer's GPU: what `--gpu-memory-gb` says, else what the driver does; None if none."""
    if config.gpu_memory_gb is not None:
        return config.gpu_memory_gb * GB
    return None if config.device == "cpu" else gpu_memory_bytes(gpu_index)


def serves_on(gpu_index: int, config: TrainingOptions, environment: Mapping[str, str]) -> bool:
    """Return True if vLLM serves from the GPU with this number among those that this process sees."""
    if config.shares_memory or not config.serves_here:
        return config.shares_memory
    servers = config.num_inference_nodes if config.broadcasts else 1
    given = [gpus for index in range(servers) if (gpus := config.server_gpus(index)) is not None]
    if not given:
        return gpu_index < config.vllm_tensor_parallel_size
    return is_given(gpu_index, ",".join(given), environment)


def is_given(gpu_index: int, named: str | None, environment: Mapping[str, str], flag: str = "--vllm-gpu") -> bool:
    """Return True if a server started on the GPUs `named` uses the visible GPU with this number.

    `named` has numbers among the visible ones or UUIDs, several with commas between them; a server without it takes
    the first it sees. Raises `ConfigError` for a number beyond the visible GPUs.
    """
    if named is None:
        return gpu_index == 0
    visible = visible_names(environment) or []
    here = visible[gpu_index] if gpu_index < len(visible) else str(gpu_index)
    return here in gpu_names(named, environment, flag).split(",")


def gpu_of(
    shape: ModelShape, config: TrainingOptions, total_bytes: float, *, shares_gpu: bool, starts_server: bool
) -> Gpu:
    """Return the trainer's GPU with vLLM's share of it.

    The share of a server that is started elsewhere is known only if `--gpu-memory-utilization` gives it. If not, it is
    taken to be the smallest that can serve, so that no run is refused that might fit.
    """
    machine_bytes = psutil.virtual_memory().total
    host_bytes = float(memory_limit_bytes(machine_bytes)) if config.gpu_memory_gb is None else None
    share = config.gpu_memory_utilization
    if not shares_gpu:
        share = 0.0
    elif not starts_server and "gpu_memory_utilization" not in config.model_fields_set:
        share = least_share(shape, config, total_bytes) if config.shares_memory else 0.0
    return Gpu(total_bytes=total_bytes, share=share, share_can_change=starts_server, host_bytes=host_bytes)
