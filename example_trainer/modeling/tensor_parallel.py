"""Tensor parallelism: the linear layers of each transformer layer are divided between ranks that train the same rows.

The plan is the model's own in transformers: queries, keys, values, gate and up projections are divided by output
features (whole heads to a rank), the output and down projections by input features, and their results are added up.
Norms are computed by every rank; the vocabulary of the embedding and of the head is divided in memory. The head's
weight is gathered for its product, since the chunked head (`logprobs`) needs all of a token's logits in one process.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from example_trainer.errors import UnsupportedModel

HEADS_DIM: Final = 2
"""Dimension of the heads in the input of a norm over each head: `[batch, tokens, heads, head dimension]`."""

_NORM_OF_HEADS: Final = "replicated_with_grad_allreduce"
"""The name of transformers for a norm whose input is divided by heads, so that its gradients have to be added up."""

_DIVIDED_SIZES: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_divisible(hf_config: Any, size: int) -> None:
    """Raise `UnsupportedModel` if the model's heads, hidden features or vocabulary cannot be divided by `size`."""
    text = hf_config.get_text_config()
    for name in _DIVIDED_SIZES:
        count = getattr(text, name, None) or 0
        if count % size:
            fitting = [str(each) for each in range(1, size) if not any(_size(text, n) % each for n in _DIVIDED_SIZES)]
            raise UnsupportedModel(
                f"--trainer-tensor-parallel-size {size} does not divide the model's {name} of {count}; "
                f"use {' or '.join(fitting[-3:])}"
            )


def _size(text: Any, name: str) -> int:
    return getattr(text, name, None) or 0


def parallelize(module: Any, mesh: DeviceMesh) -> None:
    """Divide a model between the ranks of `mesh` in place; raise `UnsupportedModel` if it has no plan for that."""
    plan = _plan(module)
    layers = {path: style for path, child in module.named_modules() if (style := _style(path, child, plan))}
    parallelize_module(module, mesh, layers)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = embedding.weight is head.weight
    _divide_vocabulary(embedding, mesh, computes=True)
    if tied:
        head.weight = embedding.weight
    else:
        _divide_vocabulary(head, mesh, computes=False)
    if left := [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]:
        raise UnsupportedModel(f"{_named(module)} has {left[0]}, for which its plan says nothing; {_INSTEAD}")


_INSTEAD: Final = "use --trainer-tensor-parallel-size 1"


def _named(module: Any) -> str:
    return type(module).__name__


def _plan(module: Any) -> dict[str, str]:
    """Return the styles in the layers by path, with `*` for numbers; raise `UnsupportedModel` if some are unknown."""
    own = getattr(module.config.get_text_config(), "base_model_tp_plan", None) or {}
    plan = {f"{module.base_model_prefix}.{path}": style for path, style in own.items() if path.startswith("layers.")}
    strange = sorted(set(plan.values()) - {"colwise", "rowwise", _NORM_OF_HEADS})
    if not plan or strange:
        reason = f"needs {strange[0]}, which is not supported" if strange else "has no plan for tensor parallelism"
        raise UnsupportedModel(f"{_named(module)} {reason}; {_INSTEAD}")
    return plan


def _style(path: str, module: nn.Module, plan: dict[str, str]) -> ParallelStyle | None:
    """Return the style of one module: the plan's, or for a module with parameters of its own that of a norm."""
    name = next((style for pattern, style in plan.items() if fnmatchcase(path, pattern)), None)
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel()
    if name == _NORM_OF_HEADS:
        return _WholeParameters(Shard(HEADS_DIM))
    is_norm = isinstance(getattr(module, "weight", None), nn.Parameter) and "norm" in type(module).__name__.lower()
    return _WholeParameters(Replicate()) if is_norm else None


class _WholeParameters(ParallelStyle):
    """The style of a module that every rank computes with all of its parameters, on inputs in the given layout."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, _leave)  # type: ignore[arg-type]

    def _enter(self, _: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return (DTensor.from_local(inputs[0], mesh, [self._layout], run_check=False), *inputs[1:])


def _leave(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
    return output.to_local()


def _divide_vocabulary(module: nn.Module, mesh: DeviceMesh, *, computes: bool) -> None:
    """Divide a matrix of one row for each token of the vocabulary; with `computes`, also the module's forward."""
    if computes:
        parallelize_module(module, mesh, RowwiseParallel(input_layouts=Replicate()))
        return
    for name, parameter in list(module.named_parameters(recurse=False)):
        rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))


def data_parallel_mesh(device: torch.device, world_size: int, size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the meshes over which weights are sharded and, if `size` is above 1, over which layers are divided.

    Consecutive ranks divide a layer, so that they are on one machine.
    """
    if size == 1:
        return init_device_mesh(device.type, (world_size,)), None
    mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("data", "tensor"))
    return mesh["data"], mesh["tensor"]
