"""Where the tensors of a module hang, and how they are moved one by one: `Module.to` would move all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def places_by_name(module: nn.Module, names: Mapping[str, str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs in the module; tied ones hang in several places."""
    name_of = {id(parameter): names[name] for name, parameter in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = path.rpartition(".")
        places.setdefault(name_of[id(parameter)], []).append((module.get_submodule(owner), attribute))
    return places


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers follow the forward; `Module.to` would take masters along that live in host memory."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(owner, name, buffer.to(device))


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds."""
    stored = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in `dtype`, if one is given and the tensor holds no integers."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def pin(masters: Iterable[torch.Tensor]) -> None:
    """Keep host memory in place, so that a GPU reads it without a copy in between."""
    for master in masters:
        master.data = master.data.pin_memory()
