"""Tracing of the model's weight loading: which part of which parameter each checkpoint tensor is loaded into.

`noting_missed` tells which parameters a real load has left as they were, `needed_parts` which tensors that a
checkpoint lacks the model would load, and `experts_kernels` where vLLM rearranges what was loaded.

vLLM fuses, splits, renames and pads as it loads. Instead of a table for each model family, the model's own
`load_weights` is called once more with tensors that have names and shapes but no data; every copy it makes is recorded
and none is carried out. The records give the place of each element of a checkpoint tensor in the server's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(kw_only=True, slots=True)
class Copy:
    """One copy the loader made: a view of a checkpoint tensor into a view of a parameter (counts are elements)."""

    target_storage: int
    target_offset: int
    shape: tuple[int, ...]
    target_stride: tuple[int, ...]
    source_offset: int
    source_shape: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_dtype: torch.dtype


@dataclass(kw_only=True, slots=True)
class Trace:
    """The copies by checkpoint name, and the tensors that cannot be described by copies, with the reason."""

    shapes: dict[str, tuple[int, ...]]
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    unmapped: dict[str, str] = field(default_factory=dict)


class _CopyWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records copies out of the given sources and keeps all other operations from changing real memory."""

    def __init__(self, sources: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._sources = sources
        self.copies: list[tuple[str | None, Copy]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self.copies.append((self._sources.get(_storage_id(args[1])), _note(args[0], args[1])))
            return args[0]
        if func in {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}:
            return args[0]  # the loader clears vocabulary padding, which is clear already
        return func(*args, **(kwargs or {}))


def trace_load_weights(load_weights: LoadWeights, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Trace:
    """Call `load_weights` with tensors of these names and shapes and return where they would have been loaded.

    They have the dtype of the model, not of the files, so that no loader converts them on the way.
    """
    sources = _without_data(shapes, dtype)
    trace = Trace(shapes=dict(shapes))
    for name, copy in _watch(load_weights, sources):
        if name is not None:
            trace.copies.setdefault(name, []).append(copy)
    for name, tensor in sources.items():
        _check_coverage(trace, name, tensor)
    return trace


def needed_parts(
    load_weights: LoadWeights,
    held: Mapping[str, tuple[int, ...]],
    lacking: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> list[str]:
    """Return those `lacking` tensors that `load_weights` would load to a place where no `held` tensor goes.

    A model loads a tied tensor to the place of another one, or leaves it out.
    """
    copies = _watch(load_weights, _without_data({**held, **lacking}, dtype))
    filled = {(copy.target_storage, copy.target_offset) for name, copy in copies if name in held}
    found = ((name, (copy.target_storage, copy.target_offset)) for name, copy in copies if name is not None)
    return sorted({name for name, place in found if name in lacking and place not in filled})


def _without_data(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def _watch(load_weights: LoadWeights, sources: Mapping[str, torch.Tensor]) -> list[tuple[str | None, Copy]]:
    """Return the copies that `load_weights` would make, each with the name of the tensor that it copies from."""
    watcher = _CopyWatcher({_storage_id(tensor): name for name, tensor in sources.items()})
    with torch.no_grad(), watcher:
        load_weights((name, tensor) for name, tensor in sources.items())
    return watcher.copies


@contextmanager
def noting_missed(model: Any) -> Iterator[list[str]]:
    """Yield a list that has, after a call of the model's `load_weights` in the block, the parameters left without one.

    vLLM only logs them when it reloads a model. The list stays empty for a model that does not say what it has loaded.
    """
    names = {name for name, _ in model.named_parameters()}
    missed: list[str] = []
    load = model.load_weights

    def loading(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        missed[:] = sorted(names - set(loaded)) if loaded is not None else []
        return loaded

    model.load_weights = loading
    try:
        yield missed
    finally:
        del model.load_weights


_AS_LOADED = frozenset({"TRITON", "BATCHED_TRITON"})
"""Names of the kernels that read experts in the order in which vLLM loads them."""


def experts_kernels(model: Any) -> str | None:
    """Return the name of the kernels for which vLLM has rearranged the model's experts after loading, or None.

    Weights that are only loaded lie in another order than those kernels read.
    """
    for module in model.modules():
        kernels = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if kernels is not None and kernels.name not in _AS_LOADED:
            return str(kernels.name)
    return None


def check_reload(model: Any) -> None:
    """Raise `RuntimeError` for a model that vLLM would not load again as it has loaded it at the start."""
    if experts_kernels(model) == "CPU":  # vLLM 0.32 rearranges experts for these kernels at the start alone
        raise RuntimeError(
            "vLLM cannot reload a mixture of experts on a CPU: use --restart-method restart, or train an adapter "
            "(--weight-bridge-mode lora_only)"
        )


def _check_coverage(trace: Trace, name: str, tensor: torch.Tensor) -> None:
    copies = sorted(trace.copies.get(name, []), key=lambda copy: copy.source_offset)
    if not copies:
        trace.unmapped[name] = "the model does not load it, or changes its values while loading"
        return
    copied = sum(math.prod(copy.shape) for copy in copies)
    if copied != tensor.numel() or any(copy.shape != copy.source_shape for copy in copies):
        trace.unmapped[name] = f"{copied} of its {tensor.numel()} elements are loaded one to one"
        del trace.copies[name]
        return
    trace.copies[name] = _merge_adjacent(copies)


def _merge_adjacent(copies: list[Copy]) -> list[Copy]:
    """Join copies that follow each other both in the checkpoint tensor and in the parameter."""
    merged = [copies[0]]
    for copy in copies[1:]:
        if _follows(merged[-1], copy):
            last = merged[-1]
            shape = (last.shape[0] + copy.shape[0], *copy.shape[1:])
            last.shape = last.source_shape = shape
        else:
            merged.append(copy)
    return merged


def _follows(first: Copy, second: Copy) -> bool:
    if not first.shape or first.shape[1:] != second.shape[1:] or first.target_storage != second.target_storage:
        return False
    if first.target_stride != second.target_stride or first.source_stride != second.source_stride:
        return False
    rows = first.shape[0]
    return (
        second.target_offset == first.target_offset + rows * first.target_stride[0]
        and second.source_offset == first.source_offset + rows * first.source_stride[0]
    )


def _note(target: torch.Tensor, source: torch.Tensor) -> Copy:
    return Copy(
        target_storage=target.untyped_storage().data_ptr(),
        target_offset=int(target.storage_offset()),
        shape=tuple(target.shape),
        target_stride=tuple(target.stride()),
        source_offset=int(source.storage_offset()),
        source_shape=tuple(source.shape),
        source_stride=tuple(source.stride()),
        target_dtype=target.dtype,
    )


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  storages without data have no other identity
