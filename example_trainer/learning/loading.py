"""Loading of a Hugging Face model for training: where, in which dtype, without dropout and without a cache."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from example_trainer.errors import ModelNotFound, NoSuchDevice
from example_trainer.learning.quantised import quantisation_config

if TYPE_CHECKING:
    from example_trainer.model import PolicyOptions

logger = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """The torch device that `auto`, `cpu`, `cuda` or `cuda:N` means on this machine."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise NoSuchDevice(f"--device {name}: name cpu, cuda, cuda:N or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoSuchDevice(f"--device {name}: this machine has no GPU that torch can use; take cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise NoSuchDevice(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


def resolve_dtype(name: str, hf_config: Any) -> torch.dtype:
    """The dtype a name means; `auto` is the checkpoint's, and float32 where it does not say."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = getattr(hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def stored_config(options: PolicyOptions) -> Any:
    """The configuration of the checkpoint as it is on disk; raises `ModelNotFound`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(options.model_name)
    except (OSError, ValueError) as error:
        raise ModelNotFound(_not_found(options.model_name, error)) from error


def load_module(options: PolicyOptions, stored: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model in training mode, by transformers' own loading; raises `ModelNotFound` where that cannot.

    It is on the CPU, but for a quantised one, which is made on `device`; on the device `meta` it has no values.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not options.debug_loading:
        transformers_logging.disable_progress_bar()
    more: dict[str, Any] = {"device_map": {"": device}} if device.type == "meta" else {}
    if options.adapter is not None and options.adapter.quantise is not None:
        more = {"quantization_config": quantisation_config(dtype), "device_map": {"": device}}
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            options.model_name, config=_for_training(stored), dtype=dtype, attn_implementation=options.attention, **more
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelNotFound(_not_found(options.model_name, error)) from error
    if options.debug_loading:
        for name, tensor in module.named_parameters():
            logger.info("loaded %s %s %s on %s", name, list(tensor.shape), tensor.dtype, tensor.device)
    if options.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = module.train()
    return trained


def _for_training(stored: Any) -> Any:
    """The checkpoint's configuration without what has no place in training; checkpoints keep the original."""
    config = deepcopy(stored)
    config.use_cache = False
    for name, value in vars(config).items():
        # The server samples without dropout; with it here, ratios to the sampled logprobs mean nothing.
        if name.endswith(("dropout", "_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _not_found(model_name: str, error: Exception) -> str:
    place = "directory" if Path(model_name).exists() else "name"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"--model-name {model_name}: no causal language model can be loaded from this {place} ({cause})"
