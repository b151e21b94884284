"""Checksums of weights, computed on the device that holds them, without a copy to host memory.

The bytes of a tensor are read as words of 32 bits (16 or 8, if their number does not divide). Each word is multiplied
by an odd pseudo-random number that depends on its position, and the products are added modulo 2**64. A product with an
odd number loses nothing, so one changed word always changes the sum; two exchanged words, a shifted block or a missing
part go unnoticed only where unrelated random factors agree, with a probability below 2**-32. (`torch.hash_tensor`
combines the elements by exclusive or, so it does not see that two are exchanged.) Integer sums have no order, so they
are equal on every device. It detects accidents, not a sender who searches for equal sums.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK_WORDS = 1 << 20
"""Words multiplied at a time: 8 MiB for their factors and 8 MiB for the products, whatever the tensor's size."""
_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of the mixing function SplitMix64, as signed integers."""
_WORDS = {0: torch.int32, 2: torch.int16}


def tensor_checksum(tensor: Tensor) -> int:
    """Return a checksum in [0, 2**64) of the tensor's bytes in the order of its elements, whatever its strides are."""
    return int(_sum(tensor)) % (1 << 64)


def combined_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hexadecimal digits over names, shapes, dtypes and bytes of the tensors; their order does not count.

    Tensors on one device are waited for once, not one by one.
    """
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name in sorted(tensors):
        by_device[tensors[name].device].append(name)
    sums: dict[str, int] = {}
    for names in by_device.values():
        sums |= zip(names, torch.stack([_sum(tensors[name]) for name in names]).tolist(), strict=True)
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums[name] % (1 << 64)}\n".encode())
    return total.hexdigest()


@torch.no_grad()
def _sum(tensor: Tensor) -> Tensor:
    """Return the weighted sum of the tensor's words, a scalar of int64 on its device."""
    words = _words_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    factors = _odd(torch.arange(min(len(words), _BLOCK_WORDS), device=words.device))
    starts = range(0, len(words), _BLOCK_WORDS)
    of_blocks = _odd(torch.arange(-1, -1 - len(starts), -1, device=words.device))
    for number, start in enumerate(starts):
        block = words[start : start + _BLOCK_WORDS].to(torch.int64)
        total += block.mul_(factors[: len(block)]).sum() * of_blocks[number]
    return total


def _words_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).contiguous()
    count = flat.numel() * flat.element_size()
    word = _WORDS.get(count % 4, torch.uint8)
    if flat.storage_offset() * flat.element_size() % word.itemsize:
        flat = flat.clone()  # a word's address must be a multiple of its size
    return flat.view(torch.uint8).view(word)


def _odd(positions: Tensor) -> Tensor:
    """Return an odd pseudo-random number for each position: SplitMix64 (Steele, Lea and Flood, 2014) of it."""
    mixed = (positions + 1) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return `values >> bits` with zeros moved in from above, as for unsigned integers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
