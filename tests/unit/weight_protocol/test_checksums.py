"""Checksums of weights change with any change of the bytes, and with nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.weight_protocol.checksums import combined_checksum, tensor_checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.int64)
LONG = (1 << 20) + 300  # words: more than one block


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def expected(data: bytes) -> int:
    """Return the checksum by its definition, with Python's integers."""
    mask, block = (1 << 64) - 1, 1 << 20

    def odd(position: int) -> int:
        mixed = (position + 1) * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        return (mixed ^ mixed >> 31) | 1

    word = {0: "<i4", 2: "<i2"}.get(len(data) % 4, "u1")
    words = np.frombuffer(data, word).tolist()
    return sum(value * odd(at % block) * odd(-1 - at // block) for at, value in enumerate(words)) & mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 1001])
def test_the_checksum_of_every_dtype_is_the_defined_sum_over_its_bytes(dtype: torch.dtype, count: int) -> None:
    tensor = random_tensor(dtype, count)
    assert tensor_checksum(tensor) == expected(tensor.view(torch.uint8).numpy().tobytes())


def test_the_checksum_of_a_tensor_of_several_blocks_is_the_defined_sum() -> None:
    tensor = random_tensor(torch.int32, LONG)
    assert tensor_checksum(tensor) == expected(tensor.numpy().tobytes())


def test_strides_and_the_place_in_memory_do_not_count() -> None:
    square = random_tensor(torch.bfloat16, 6, 6)
    assert tensor_checksum(square.t()) == tensor_checksum(square.t().contiguous())
    piece = square.reshape(-1)[1:9]
    assert piece.data_ptr() % 4, "not at the address of a word of 32 bits"
    assert tensor_checksum(piece) == tensor_checksum(piece.clone())


@given(at=st.integers(0, 999), bit=st.integers(0, 30))
def test_one_flipped_bit_anywhere_changes_the_checksum(at: int, bit: int) -> None:
    tensor = random_tensor(torch.int32, 1000)
    before = tensor_checksum(tensor)
    tensor[at] ^= 1 << bit
    assert tensor_checksum(tensor) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_exchanged_shifted_and_missing_parts_change_the_checksum(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 64, 32)
    swapped, cut = tensor.clone(), tensor.clone()
    swapped[[3, 40]] = tensor[[40, 3]]
    cut[63] = 0
    others = [swapped, cut, tensor.roll(1), tensor.flip(0), tensor.t().contiguous(), torch.zeros_like(tensor)]
    assert len({tensor_checksum(each) for each in (tensor, *others)}) == 1 + len(others)


def test_exchanged_whole_blocks_change_the_checksum() -> None:
    tensor = random_tensor(torch.int32, 2 << 20)
    assert tensor_checksum(tensor) != tensor_checksum(tensor.roll(1 << 20))


def test_names_shapes_and_dtypes_count_in_the_combined_checksum_and_the_order_does_not() -> None:
    first, second = random_tensor(torch.float32, 4, 6, seed=1), random_tensor(torch.float32, 4, 6, seed=2)
    whole = combined_checksum({"a": first, "b": second})
    assert combined_checksum({"b": second, "a": first}) == whole
    others = [
        {"a": second, "b": first},
        {"a": first, "c": second},
        {"a": first.view(6, 4), "b": second},
        {"a": first.view(torch.int32), "b": second},
        {"a": first},
    ]
    assert whole not in {combined_checksum(each) for each in others}


def test_no_tensors_have_a_checksum_too() -> None:
    assert len(combined_checksum({})) == len(combined_checksum({"empty": torch.empty(0)})) == 32
