"""Checkpoint names against module names: the one place that knows that the two may differ.

The server's manifest, safetensors files and the masters speak of tensors as the checkpoint on disk
does. Transformers renames some of them while loading (Mixtral's `block_sparse_moe` is `mlp` in the
module) and merges others (per-expert matrices into one). The renaming is asked of transformers
itself, by running its own save conversion over tensors without data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion


def checkpoint_name(model: Any, parameter_name: str, shape: torch.Size) -> str | None:
    """What a checkpoint calls this parameter; None when it is not stored as one tensor of this shape."""
    empty = torch.empty(shape, device="meta")
    stored: dict[str, torch.Tensor] = revert_weight_conversion(model, {parameter_name: empty})
    if len(stored) != 1:
        return None
    name, tensor = next(iter(stored.items()))
    return name if tensor.shape == shape else None


def checkpoint_names(model: Any) -> dict[str, str]:
    """Module parameter name to checkpoint name, tied parameters once; those stored otherwise keep their own name."""
    return {name: checkpoint_name(model, name, parameter.shape) or name for name, parameter in model.named_parameters()}


def merged_parameters(model: Any) -> frozenset[str]:
    """Parameters that a checkpoint stores as several tensors, or in another shape."""
    return frozenset(
        name for name, parameter in model.named_parameters() if checkpoint_name(model, name, parameter.shape) is None
    )


def to_checkpoint_layout(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict under the names and in the shapes that a checkpoint has."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted
