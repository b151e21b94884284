"""Pinned memory, of which torch allocates only powers of two, is shared by many tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from example_trainer.weight_protocol import pinned_memory
from example_trainer.weight_protocol.pinned_memory import PinnedBlocks, pin

SHAPES = [(105, 16), (21, 16), (21, 16), (105, 16), (283, 16), (283, 16), (283, 16)] * 12
"""Those of a model's layers, as a 14B model's are in MiB: alone, each (283, 16) takes nearly twice its size."""


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of the blocks that are pinned, here ordinary memory, of at most 64 KiB for usual tensors."""
    sizes, make = [], torch.empty

    def empty(*shape, pin_memory=False, **more):
        if pin_memory:
            sizes.append(shape[0])
        return make(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(pinned_memory, "FIRST_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(pinned_memory, "LARGEST_BLOCK_BYTES", 1 << 16)
    return sizes


def test_masters_are_pinned_in_blocks_of_the_sizes_that_torch_allocates_and_little_is_lost(pinned):
    masters = [nn.Parameter(torch.full(shape, float(number))) for number, shape in enumerate(SHAPES)]
    pin(masters)
    assert all(size & (size - 1) == 0 for size in pinned)
    assert sum(pinned) < 1.2 * sum(master.nbytes for master in masters)
    assert all((master == number).all() and master.requires_grad for number, master in enumerate(masters))


def test_tensors_of_one_block_do_not_overlap_whatever_their_sizes_and_dtypes(pinned):
    blocks, kept = PinnedBlocks(), []
    for number, (shape, dtype) in enumerate(
        [((3,), torch.bfloat16), ((), torch.float32), ((5, 7), torch.float32), ((1 << 17,), torch.bfloat16)] * 3
    ):
        tensor = blocks.empty(shape, dtype).fill_(number)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        kept.append(tensor)
    assert all((tensor == number).all() for number, tensor in enumerate(kept))
    assert max(pinned) == 1 << 18, "one that is larger than the largest block has a block for itself"
