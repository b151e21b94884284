"""Packed buckets: many tensors in one flat buffer of bytes, so that a broadcast sends few, large messages.

Sender and receivers know each bucket's layout beforehand: the names, shapes and dtypes of its tensors in their order.
Each tensor begins at a multiple of 16 bytes, so that a view of it in the buffer is aligned for every dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Size up to which weights are packed together; a weight above it is a bucket of its own."""
_ALIGNMENT = 16

TensorEntry = tuple[str, list[int], str]
"""Name, shape and dtype of a tensor, as they are sent."""


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    """Return the entry that describes `tensor`."""
    return name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one bucket."""

    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(_padded(_nbytes(entry)) for entry in self.entries)

    def empty(self, device: torch.device) -> Tensor:
        """Return a buffer `[nbytes]` of uint8 for this bucket, on `device`; the gaps between tensors are zero."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def unpack(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors by name, as views of the buffer."""
        views: dict[str, Tensor] = {}
        start = 0
        for entry in self.entries:
            name, shape, dtype = entry
            views[name] = buffer[start : start + _nbytes(entry)].view(getattr(torch, dtype)).view(shape)
            start += _padded(_nbytes(entry))
        return views


def fill_buckets(parts: Mapping[str, Sequence[TensorEntry]], limit_bytes: int) -> list[tuple[list[str], Bucket]]:
    """Return the parts of each bucket, in their order, with its layout: at most `limit_bytes`, or a single part."""
    filled: list[tuple[list[str], Bucket]] = []
    names: list[str] = []
    held: list[TensorEntry] = []
    nbytes = 0
    for name, entries in parts.items():
        size = Bucket(tuple(entries)).nbytes
        if names and nbytes + size > limit_bytes:
            filled.append((names, Bucket(tuple(held))))
            names, held, nbytes = [], [], 0
        names.append(name)
        held += entries
        nbytes += size
    return [*filled, (names, Bucket(tuple(held)))] if names else filled


def transfer_checksum(buckets: Sequence[Bucket], sums: Iterable[int]) -> str:
    """Return the checksum of a transfer: over the layouts of its buckets and the checksum of each one's buffer."""
    total = hashlib.blake2b(digest_size=16)
    for bucket, own in zip(buckets, sums, strict=True):
        total.update(f"{bucket.entries} {own}\n".encode())
    return total.hexdigest()


def _nbytes(entry: TensorEntry) -> int:
    dtype: torch.dtype = getattr(torch, entry[2])
    return math.prod(entry[1]) * dtype.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
