"""Pinned host memory for tensors that stay: a GPU reads and writes it without an intermediate copy.

Torch rounds the size of each pinned allocation up to a power of two, whatever is pinned: one by one, the masters of a
14B model (Qwen 2.5's shape) take 102 GB for 59, and the copies of their gradients 51 GB for 30. So many tensors share
one block, whose size is a power of two: at most 15 % is lost then for models of 7B to 32B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FIRST_BLOCK_BYTES, LARGEST_BLOCK_BYTES = 1 << 26, 1 << 31
"""Each block is twice as large as the one before; only a tensor that is larger than the largest gets one above it."""
_ALIGNMENT = 64


class PinnedBlocks:
    """The blocks from which tensors are cut; a block is freed once this object and all of its tensors are gone."""

    def __init__(self) -> None:
        self._rests: list[Tensor] = []
        """The unused end of each block, as bytes."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a pinned tensor without defined values."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        place = next((index for index, rest in enumerate(self._rests) if len(rest) >= taken), len(self._rests))
        if place == len(self._rests):
            size = max(min(LARGEST_BLOCK_BYTES, FIRST_BLOCK_BYTES << place), 1 << (taken - 1).bit_length())
            self._rests.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        rest = self._rests[place]
        self._rests[place] = rest[taken:]
        return rest[:nbytes].view(dtype).view(tuple(shape))


def pin(tensors: Iterable[Tensor]) -> None:
    """Move the values of tensors in host memory into pinned memory."""
    blocks = PinnedBlocks()
    for tensor in tensors:
        tensor.data = blocks.empty(tensor.shape, tensor.dtype).copy_(tensor.data)
