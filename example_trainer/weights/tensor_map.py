"""Conversion of the server's manifest into views: one tensor per checkpoint name, over memory that vLLM reads.

For each checkpoint tensor the manifest lists which of its elements are stored where in a shared storage, as traced from
the model class's own weight loading (`serving.vllm.load_tracing`). This module joins these pieces into one strided view
per tensor, or refuses: a tensor is mapped exactly or not at all, and a model with one unmapped parameter is not
trained. There is no table of model families: if one fails, the tracing or this module is fixed; a model that cannot be
shared at all is refused by `serving.startup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from example_trainer.errors import CannotShare
from example_trainer.modeling.loading import checkpoint_names, merged_parameters
from example_trainer.weight_protocol.segment import StridedRegion
from example_trainer.weight_protocol.shm_header import Piece, TensorMap

if TYPE_CHECKING:
    from example_trainer.weight_protocol.manifest import BridgeManifest


@dataclass(frozen=True, slots=True)
class _Box:
    """The region of the checkpoint tensor that one piece covers, with the strides that it implies for the view."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int | None, ...]
    storage: str
    offset: int

    def overlaps(self, other: _Box) -> bool:
        return all(
            a < b + m and b < a + n for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )


def region_of(tensor: TensorMap) -> StridedRegion:
    """Return the single region that a tensor's pieces form; raise `ValueError` with the reason if they form none."""
    shape = tuple(tensor.shape)
    boxes = [_box(piece, shape) for piece in tensor.pieces]
    if len({box.storage for box in boxes}) != 1:
        raise ValueError(f"its {len(boxes)} pieces are in different storages")
    covered = sum(prod(box.size) for box in boxes)
    if covered != prod(shape) or any(a.overlaps(b) for a, b in combinations(boxes, 2)):
        raise ValueError(f"its pieces cover {covered} of {prod(shape)} elements, or some twice")
    stride = tuple(_common_stride(boxes, dimension, shape) for dimension in range(len(shape)))
    origins = {box.offset - _dot(box.start, stride) for box in boxes}
    if len(origins) != 1:
        raise ValueError(f"its {len(boxes)} pieces are not adjacent in memory")
    return StridedRegion(boxes[0].storage, origins.pop(), shape, stride)


def _box(piece: Piece, shape: tuple[int, ...]) -> _Box:
    """Read a piece as a box of the checkpoint tensor, by matching its source strides to dimensions."""
    contiguous = _contiguous_stride(shape)
    start, rest = [], piece.source_offset
    for step in contiguous:
        start.append(rest // step)
        rest %= step
    size = [1] * len(shape)
    stride: list[int | None] = [None] * len(shape)
    for extent, source_step, step in zip(piece.source_shape, piece.source_stride, piece.stride, strict=True):
        if extent == 1:
            continue
        matching = [k for k, n in enumerate(shape) if n > 1 and contiguous[k] == source_step]
        if not matching:
            raise ValueError("the server reshapes it while loading")
        size[matching[0]], stride[matching[0]] = extent, step
    if list(piece.shape) != list(piece.source_shape):
        raise ValueError("the server broadcasts it while loading")
    return _Box(tuple(start), tuple(size), tuple(stride), piece.storage, piece.offset)


def _common_stride(boxes: list[_Box], dimension: int, shape: tuple[int, ...]) -> int:
    strides = {box.stride[dimension] for box in boxes} - {None}
    if len(strides) == 1:
        return strides.pop() or 0
    if shape[dimension] == 1:
        return 0
    if strides:
        raise ValueError(f"its pieces have different strides along dimension {dimension}")
    rows = sorted((box.start[dimension], box.offset) for box in boxes)  # each piece is one row along it
    return (rows[1][1] - rows[0][1]) // max(1, rows[1][0] - rows[0][0])


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _dot(first: Iterable[int], second: Iterable[int]) -> int:
    return sum(a * b for a, b in zip(first, second, strict=True))


def view_at(storage: torch.UntypedStorage, region: StridedRegion, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a region of shared memory; nothing is copied."""
    last = region.offset + _dot((n - 1 for n in region.shape), region.stride)
    if region.offset < 0 or (last + 1) * dtype.itemsize > storage.nbytes():
        raise CannotShare(
            f"the manifest places a tensor at elements {region.offset}..{last} of storage {region.storage}, "
            f"which has {storage.nbytes()} bytes; start the vLLM server again"
        )
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, region.offset, region.shape, region.stride)


def map_parameters(
    model: Any, manifest: BridgeManifest, storages: Mapping[str, torch.UntypedStorage]
) -> dict[str, torch.Tensor]:
    """Return views over the server's tensors for every parameter of a Hugging Face model, by checkpoint name.

    Raises `CannotShare` with their number and, of the first three that cannot be mapped, the names and reasons.
    """
    names = checkpoint_names(model)
    merged = merged_parameters(model)
    views: dict[str, torch.Tensor] = {}
    owners: dict[StridedRegion, str] = {}
    refused: dict[str, str] = {}
    for parameter_name, parameter in model.named_parameters():
        name = names[parameter_name]
        if parameter_name in merged:
            refused[name] = "transformers merges it from several checkpoint tensors"
            continue
        try:
            entry = _entry(name, model, manifest)
            region = _without_padding(region_of(entry), tuple(parameter.shape))
            views[name] = view_at(storages[region.storage], region, _dtype(entry))
        except ValueError as problem:
            refused[name] = str(problem)
            continue
        if (twin := owners.setdefault(region, name)) != name:
            refused[name] = f"the server keeps it in the same memory as {twin}, the trainer separately"
    refused.update(_split_ties(model, manifest, names))
    if refused:
        raise CannotShare(_refusal(manifest.model, refused, len(names)))
    return views


def _entry(name: str, model: Any, manifest: BridgeManifest) -> TensorMap:
    """Return the manifest's entry for a tensor, with or without the base model's prefix in either name."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    spellings = (name, name.removeprefix(prefix), prefix + name)
    for spelling in spellings:
        target = manifest.tied.get(spelling, spelling)
        if target in manifest.tensors:
            return manifest.tensors[target]
    if any(spelling in manifest.unmapped for spelling in spellings):
        raise ValueError("the server could not tell where it loads this tensor")
    raise ValueError("the server does not have this tensor")


def _split_ties(model: Any, manifest: BridgeManifest, names: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors that are tied in the trainer but stored in two places at the server, with the reason."""
    canonical = {id(parameter): names[name] for name, parameter in model.named_parameters()}
    split = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical[id(parameter)]
        target = manifest.tied.get(alias, alias)
        if alias not in names and target in manifest.tensors and name in manifest.tensors:
            try:
                same = region_of(manifest.tensors[target]) == region_of(manifest.tensors[name])
            except ValueError:
                continue  # already refused under its own name
            if not same:
                split[alias] = f"the trainer ties it to {name}, the server keeps it separate"
    return split


def _without_padding(region: StridedRegion, shape: tuple[int, ...]) -> StridedRegion:
    """Cut rows that only pad the vocabulary."""
    if region.shape == shape:
        return region
    if region.shape[1:] == shape[1:] and region.shape[0] > shape[0]:
        return StridedRegion(region.storage, region.offset, shape, region.stride)
    raise ValueError(f"it has shape {region.shape} at the server and {shape} in the trainer")


def _dtype(entry: TensorMap) -> torch.dtype:
    dtype = getattr(torch, entry.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"it is stored as {entry.dtype}, which cannot be trained in place; serve it unquantised")
    return dtype


def _refusal(model_name: str, refused: Mapping[str, str], total: int) -> str:
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:3])
    more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
    return (
        f"{model_name} cannot be shared: {len(refused)} of {total} tensors are not mapped ({shown}{more}); "
        "use --weight-bridge-mode none"
    )
