"""The settings of the policy's inference server, as the trainer's options determine them.

The launcher writes them to the server's settings file, `vllm_manager` passes them as flags. Each adds what depends on
the program that starts the server: address, model, files. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atropos_api.common.option_flags import flag
from example_trainer.options.publish import served_rank
from example_trainer.options.training_options import TrainingOptions


def server_settings(config: TrainingOptions, index: int = 0) -> dict[str, Any]:
    """Return the settings of the policy's server with this index, by the names of the server's own options."""
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "seed": config.seed + index,
    }
    if config.mode.shares_memory or config.registered_servers:
        settings |= {"share_weights": config.shares_memory, "await_policy": config.broadcasts}
    if config.trains_adapter:
        settings |= {"enable_lora": True, "max_lora_rank": served_rank(config.lora_r)}
        settings["max_loras"] = config.served_adapters
    if config.mode.awaits_policy or config.registered_servers:
        settings["await_policy"] = True
    if config.vllm_tensor_parallel_size > 1:
        settings["tensor_parallel_size"] = config.vllm_tensor_parallel_size
    if config.vllm_quantization is not None:
        settings["quantization"] = config.vllm_quantization
    if config.vllm_head_dtype != "float32":
        settings["head_dtype"] = config.vllm_head_dtype
    if config.vllm_enable_sleep_mode:
        settings["enable_sleep_mode"] = True
    return settings


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line arguments of the server; those that are None are left out."""
    arguments: list[str] = []
    for name, value in settings.items():
        if value is True:
            arguments.append(flag(name))
        elif value is False:
            arguments.append(flag(f"no_{name}"))
        elif value is not None:
            arguments += [flag(name), str(value)]
    return arguments
