"""Where tensors lie in memory that another process maps, in plain values that become JSON in a manifest.

Plain classes, because whoever maps weights on a GPU needs nothing else of a manifest, and no library to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamMapping:
    """One parameter of the server, by the server's own name for it."""

    ipc_handle: dict[str, Any]
    shape: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One block of shared memory: its handle is all that is needed to map it."""

    id: str
    handle: dict[str, Any]
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a checkpoint tensor: which of its elements lie where in a storage. All counts are of elements."""

    storage: str
    offset: int
    shape: list[int]
    stride: list[int]
    source_offset: int
    source_shape: list[int]
    source_stride: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """Where a checkpoint tensor lies; vocabulary padding is left out."""

    pieces: list[Piece]
    shape: list[int]
    dtype: str
