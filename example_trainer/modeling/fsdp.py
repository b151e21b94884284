"""A policy whose weights, gradients and optimizer state are sharded over the ranks with FSDP2.

Each transformer layer is one FSDP group. Masters are `DTensor`s, a slice of each weight on every rank: in fp32 on the
device or in host memory, or in the served dtype (`--master-weights`). Rank 0 reads the model and sends the others their
slices, one weight at a time: no other rank ever holds more than one whole weight. A forward gathers one layer's weights
at a time, in the served dtype; the backward sums gradients over the ranks in fp32 and does not average, since the loss
weights are already those of the whole step. Work that needs whole weights (a checkpoint) runs on rank 0 inside
`ShardedPolicy.gathered`; a broadcast gathers one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from example_trainer.errors import UnsupportedModel
from example_trainer.modeling.loading import cast_floating, load_module, move_buffers, resolve_dtype
from example_trainer.modeling.policy import Policy
from example_trainer.modeling.shards import shard_like, sliced, whole
from example_trainer.modeling.tensor_parallel import check_divisible, data_parallel_mesh, parallelize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from example_trainer.modeling.loading import PolicyOptions, Sharding

ResultT = TypeVar("ResultT")
FORWARD_METHOD = "atropos_compute"


class ShardedPolicy(Policy):
    """A `Policy` sharded over the ranks of the default process group: all ranks must call its methods together."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        """Shard `module`, which is on the device `meta` and has no values yet; `fill` sets them."""
        super().__init__(module, **settings)
        self._sharding: Sharding = settings["options"].sharding
        self._whole: dict[str, torch.Tensor] | None = None
        on_host = settings["options"].master_weights == "host"
        size = self._sharding.tensor_parallel_size
        mesh, tensor_mesh = data_parallel_mesh(self.device, dist.get_world_size(), size)
        if tensor_mesh is not None:
            check_divisible(self.hf_config, size)
            parallelize(module, tensor_mesh)
        _shard(module, mesh, self.dtype, self._sharding.reshard_after_forward, on_host=on_host)
        module.to_empty(device="cpu" if on_host else self.device)
        move_buffers(module, self.device)
        self.masters = {name: self._current(name) for name in self.masters}

    @torch.no_grad()
    def fill(self, source: nn.Module | None) -> None:
        """Copy the values of rank 0's `source`, freeing its weights one by one; `source` is None on the other ranks."""
        source_parameters = {} if source is None else dict(source.named_parameters())
        for name, parameter in self.module.named_parameters():
            if source is None:
                tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            else:
                tensor = source_parameters[name].detach().to(device=parameter.device, dtype=parameter.dtype)
                source_parameters[name].data = torch.empty(0)
            parameter.copy_(sliced(tensor, parameter, source_rank=0))
        for name, buffer in self.module.named_buffers():
            if source is not None:
                buffer.copy_(source.get_buffer(name))
            dist.broadcast(buffer, src=0)
        _refuse_unfilled(self.module)

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    def compute(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        module: Any = self.module
        result: ResultT = getattr(module, FORWARD_METHOD)(function, *arguments)
        if not torch.is_grad_enabled():
            # A backward frees the gathered weights; without one the next forward would reuse them, even if outdated.
            # So would a layer that keeps them until its backward (`reshard_after_forward` False).
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        return result

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather whole weights into rank 0's host memory during the context, so `checkpoint_tensors` works there."""
        is_main = dist.get_rank() == 0
        self._whole = {}
        try:
            for name in self._places:
                self._whole[name] = whole(self._current(name).detach(), keep=is_main)
            yield
        finally:
            self._whole = None

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Run forwards as `Policy.with_weights` does, but by overwriting the masters during the context."""
        kept = {name: self.masters[name].detach().to_local().clone() for name in weights}  # type: ignore[attr-defined]
        try:
            with torch.no_grad():
                for name, weight in weights.items():
                    self._assign(self.masters[name], weight)
                yield
        finally:
            with torch.no_grad():
                for name, local in kept.items():
                    self.masters[name].to_local().copy_(local)  # type: ignore[attr-defined]

    @torch.no_grad()
    def whole_weight(self, parameter_name: str, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
        shard: Any = cast_floating(self._current(self._names[parameter_name]).detach(), dtype)
        gathered: torch.Tensor = shard.full_tensor()
        return gathered if keep else None

    def _assign(self, master: nn.Parameter, weight: torch.Tensor) -> None:
        master.copy_(weight if isinstance(weight, DTensor) else shard_like(weight, master))

    def _stored(self, parameter_name: str, name: str) -> torch.Tensor:
        if self._whole is None:
            raise RuntimeError(f"{parameter_name} is sharded over the ranks; gather the weights first")
        return self._whole[name]


def load_sharded(
    options: PolicyOptions, stored: Any, *, served_dtype: torch.dtype, device: torch.device
) -> ShardedPolicy:
    """Load the sharded policy that `options` describe; only rank 0 reads it, into host memory in its stored dtype."""
    dtype = served_dtype if options.master_weights == "none" else torch.float32
    module = load_module(options, stored, dtype, torch.device("meta"))
    policy = ShardedPolicy(
        module,
        hf_config=stored,
        served_dtype=served_dtype,
        device=device,
        options=options,
    )
    reads = dist.get_rank() == 0
    policy.fill(load_module(options, stored, resolve_dtype("auto", stored), torch.device("cpu")) if reads else None)
    return policy


def _refuse_unfilled(module: nn.Module) -> None:
    """Raise `UnsupportedModel` for a tensor that is not a parameter or buffer: `fill` cannot give it a value."""
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UnsupportedModel(
                    f"{type(module).__name__} keeps {path}.{name} outside its parameters and buffers, so it cannot be "
                    "given to other ranks; train it with --world-size 1"
                )


def _shard(module: Any, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward: bool, *, on_host: bool) -> None:
    """Shard `module` in place: one group for each transformer layer and one for the rest.

    The rest stays gathered until the end of the backward, since embedding, head and final norm are needed at both its
    ends. With `on_host` the shards, their gradients and the optimizer's states are in host memory.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    groups = [*_layers(module), module]
    for group in groups:
        reshard = reshard_after_forward if group is not module else False
        fully_shard(group, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
        _sum_gradients(group, mesh)
    setattr(module, FORWARD_METHOD, MethodType(_call, module))
    register_fsdp_forward_method(module, FORWARD_METHOD)


def _call(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(module, *arguments)


def _sum_gradients(group: Any, mesh: DeviceMesh) -> None:
    """Make `group` sum gradients over the ranks instead of averaging: denominators are those of the whole step."""
    group.set_gradient_divide_factor(1.0)
    if mesh.device_type == "cpu":
        group.set_force_sum_reduction_for_comms(True)  # gloo has no scaling reduction


def _layers(module: Any) -> list[nn.Module]:
    """Return the transformer layers, found by the class names in the model's `_no_split_modules`."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [each for each in module.modules() if type(each).__name__ in names]
    if not found:
        raise UnsupportedModel(
            f"{type(module).__name__} does not declare which of its modules are layers, so it cannot be sharded over "
            "several ranks; train it with --world-size 1"
        )
    return found
