"""The layout for a variable-length kernel equals that of the buckets, for each release of torch with the kernel.

The kernel itself runs on a GPU alone (`make gpu`); here a plain one of the same signature takes its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from example_trainer.modeling import attention, layout_choice
from example_trainer.modeling.attention import Segment, build_layout, packed_attention
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.policy import Policy

CPU = torch.device("cpu")
SEGMENTS = [Segment(0, 5), Segment(5, 1), Segment(6, 9)]
HEADS, KEY_HEADS, TOKENS, WIDTH = 4, 2, 15, 8


def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, left: int, scale: float) -> Tensor:
    """Attend causally within each segment, `left` tokens back (-1: all); tensors are `[tokens, heads, dim]`."""
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


@pytest.fixture
def with_varlen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the layout of a GPU in 16 bits; the list has the number of tokens of each call of the kernel."""
    calls: list[int] = []

    def kernel(*tensors: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
        calls.append(len(tensors[0]))
        return attend(*tensors[:4], left=window_size[0], scale=scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    for module in (attention, layout_choice.attention):
        monkeypatch.setattr(module, "uses_varlen", lambda device, dtype: True)
    return calls


def test_the_layout_is_chosen_by_trying_the_kernel_that_training_uses(policy: Policy, with_varlen: list[int]) -> None:
    assert choose_layout(policy) == "packed"
    assert with_varlen


def test_a_model_whose_heads_the_kernel_cannot_attend_trains_on_padded_rows(
    policy: Policy, with_varlen: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse)
    assert choose_layout(policy) == "rows"
    assert "head dimension at most 256" in caplog.text


def test_a_kernel_that_attends_otherwise_is_not_used(
    policy: Policy, with_varlen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(*tensors: Any, scale: float, **_: Any) -> Tensor:
        return attend(*tensors[:4], left=1, scale=scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", narrow)
    assert choose_layout(policy) == "rows"


class _Attended(TorchFunctionMode):
    """Records the key heads and `enable_gqa` of each call of SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.calls.append((args[1].shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


LONG_SEGMENTS = [Segment(0, 20), Segment(20, 150, 0, 20), Segment(170, 130, 0, 20)]
"""Two answers behind one prompt of 20 tokens, too long for explicit scores, so that SDPA gets a mask."""


def test_on_a_gpu_key_heads_are_repeated_for_sdpa_with_equal_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 300, WIDTH, requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    layout = build_layout(LONG_SEGMENTS, 300, CPU)
    found = []
    for is_cuda in (False, True):
        monkeypatch.setattr(attention, "_on_gpu", lambda _, is_cuda=is_cuda: is_cuda)
        with _Attended() as seen:
            mixed = packed_attention(None, query, key, value, None, layout)[0]
        assert set(seen.calls) == {(HEADS, False) if is_cuda else (KEY_HEADS, True)}
        found.append((mixed, *torch.autograd.grad(mixed.square().sum(), [query, key, value])))
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)
