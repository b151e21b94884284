"""The layout for a variable-length kernel says the same as the buckets, whichever release of torch brings the kernel.

The kernel itself runs on a GPU alone (`make gpu`); here a plain one of the same signature takes its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from example_trainer.modeling.attention import Segment, build_layout, packed_attention

CPU = torch.device("cpu")
SEGMENTS = [Segment(0, 5), Segment(5, 1), Segment(6, 9)]
HEADS, KEY_HEADS, TOKENS, WIDTH = 4, 2, 15, 8


def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, left: int, scale: float) -> Tensor:
    """`[tokens, heads, dim]`: each segment causally over itself, `left` tokens back (-1: all of them)."""
    outputs = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        seen = (behind >= 0) & ((behind <= left) | (left == -1))
        part = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        shared = query.shape[1] != key.shape[1]
        mixed = functional.scaled_dot_product_attention(*part, attn_mask=seen, scale=scale, enable_gqa=shared)
        outputs.append(mixed[0].transpose(0, 1))
    return torch.cat(outputs)


def kernel_of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert query.shape == key.shape, "this release has one key for each query"
    return attend(query, key, value, cu_seq_q, window_size[0], scale)


def kernel_of_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return attend(query, key, value, cu_seq_q, window_size[0], scale)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [HEADS, KEY_HEADS])
@pytest.mark.parametrize("kernel", [kernel_of_2_11, kernel_of_2_13])
def test_a_variable_length_kernel_is_asked_for_what_the_buckets_compute(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, key_heads: int, window: int | None
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, TOKENS, WIDTH) for heads in (HEADS, key_heads, key_heads))
    found, expected = (
        packed_attention(None, query, key, value, None, build_layout(SEGMENTS, TOKENS, CPU, varlen=varlen),
                         sliding_window=window)[0]
        for varlen in (True, False)
    )  # fmt: skip
    torch.testing.assert_close(found.flatten(2), expected.flatten(2))
