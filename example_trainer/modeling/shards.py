"""Tensors of which each rank holds a shard: slicing, gathering, and sums over the ranks that hold the other shards.

A sharded tensor is a `DTensor`; every function here also accepts an ordinary tensor, which one process holds whole. An
optimizer's state is sharded with its parameter. `StateShards` describes a state tensor whose dimensions are some of the
parameter's, such as the row means of Adafactor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # torch has no public form


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this rank holds; it shares memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_indices(tensor: Tensor) -> tuple[int, ...]:
    """Return the place of this rank's first element in the whole tensor, an index for each dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return starts


def whole(value: Any, *, keep: bool) -> Any:
    """Return `value` with its sharded tensors gathered by all ranks: on the CPU with `keep`, else replaced by None."""
    if isinstance(value, DTensor):
        gathered = value.full_tensor()
        return gathered.cpu() if keep else None
    if isinstance(value, dict):
        return {key: whole(item, keep=keep) for key, item in value.items()}
    return [whole(item, keep=keep) for item in value] if isinstance(value, list) else value


def sliced(tensor: Tensor, like: Any, *, source_rank: int | None) -> DTensor:
    """Shard a whole tensor as `like` is. The values are those of `source_rank`; None: each rank slices its own copy."""
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=source_rank)


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor, which every rank holds, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return sliced(tensor.to(device=like.device, dtype=like.dtype), like, source_rank=None)


class WholeState:
    """An optimizer's state for a checkpoint: gathered from all ranks into rank 0's host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state: dict[str, Any] = whole(optimizer.state_dict(), keep=dist.get_rank() == 0)

    def state_dict(self) -> dict[str, Any]:
        return self._state


def shard_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a checkpoint's optimizer state with tensors of a parameter's shape sharded as the parameter is.

    Tensors of other shapes stay whole: an optimizer that has some shards them when it loads them.
    """
    if "inner" in state:
        return {**state, "inner": shard_optimizer_state(state["inner"], optimizer)}
    spread: dict[Any, Any] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        own = state["state"].get(index)
        if own is not None:
            spread[index] = {
                key: _as_parameter(value, parameter) if getattr(value, "shape", None) == parameter.shape else value
                for key, value in own.items()
            }
    return {**state, "state": spread}


def _as_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return sliced(value.to(parameter.device), parameter, source_rank=None)


def sum_over_shards(values: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
    """Add up in place, over the ranks between which `dims` of the parameter are divided, and return `values`.

    With several mesh dimensions a sum runs over each that divides one of `dims`; a whole parameter needs none.
    """
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            if getattr(placement, "dim", None) in dims:
                dist.all_reduce(values, group=parameter.device_mesh.get_group(mesh_dim))
    return values


@dataclass(frozen=True, slots=True)
class StateShards:
    """The layout of a state tensor: its dimension i corresponds to the parameter's dimension `kept[i]`.

    The last dimension may have another length than the parameter's (`last_length` per rank), as blocks of values have.
    """

    kept: tuple[int, ...]
    last_length: int | None = None

    def zeros(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a state of zeros for `parameter`, sharded with it."""
        shape = self._shape([local_part(parameter).shape[dim] for dim in self.kept])
        local = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return self._joined(local, parameter) if isinstance(parameter, DTensor) else local

    def held(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of a whole state from a checkpoint; raise `ValueError` if its shape does not fit."""
        expected = self._whole_shape(parameter)
        if saved.shape != expected:
            raise ValueError(
                f"a state of shape {tuple(saved.shape)} belongs to a parameter that was divided otherwise; "
                f"{tuple(expected)} fits"
            )
        if isinstance(saved, DTensor):
            return saved
        saved = saved.to(parameter.device, copy=True)
        if not isinstance(parameter, DTensor):
            return saved
        return distribute_tensor(saved, parameter.device_mesh, self._placements(parameter), src_data_rank=None)

    def _shape(self, lengths: Sequence[int]) -> torch.Size:
        return torch.Size(lengths if self.last_length is None else [*lengths[:-1], self.last_length])

    def _whole_shape(self, parameter: Tensor) -> torch.Size:
        shape = list(self._shape([parameter.shape[dim] for dim in self.kept]))
        if isinstance(parameter, DTensor) and self.last_length is not None:
            for mesh_dim, placement in enumerate(self._placements(parameter)):
                if getattr(placement, "dim", None) == len(shape) - 1:
                    shape[-1] *= parameter.device_mesh.size(mesh_dim)
        return torch.Size(shape)

    def _joined(self, local: Tensor, parameter: DTensor) -> DTensor:
        shape = self._whole_shape(parameter)
        stride = torch.empty(shape, device="meta").stride()
        made: DTensor = DTensor.from_local(
            local, parameter.device_mesh, self._placements(parameter), run_check=False, shape=shape, stride=stride
        )
        return made

    def _placements(self, parameter: DTensor) -> list[Any]:
        """Return the state's placements: the parameter's, replicated where the state lacks the divided dimension."""
        placements: list[Any] = []
        for placement in parameter.placements:
            dim = getattr(placement, "dim", None)
            if dim is None or dim not in self.kept:
                placements.append(Replicate())
            elif self.kept.index(dim) == dim:
                placements.append(placement)
            else:
                placements.append(Shard(self.kept.index(dim)))
        return placements
