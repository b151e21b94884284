"""Adapters on a CPU: each row is computed with the adapter of its slot, as vLLM's own operations do it row by row."""

from __future__ import annotations

import pytest
import torch

from example_trainer.serving.vllm.cpu_adapters import OPERATIONS

ROWS, SLOTS, IN, OUT, PADDED = 6, 3, 4, 5, 8
FURTHER = {
    "bgmv_shrink": [(2.0,)],
    "bgmv_expand": [(True,), (False,)],
    "bgmv_expand_slice": [(2, OUT, True), (0, OUT, False)],
}
CASES = [(name, more) for name, cases in FURTHER.items() for more in cases]


def operands(slots, *, dtype=torch.float32, dimensions=3):
    noise = torch.Generator().manual_seed(0)
    weights = torch.randn(SLOTS, OUT, IN, generator=noise).to(dtype)
    weights = weights[:, None] if dimensions == 4 else weights
    inputs = torch.randn(ROWS, IN, generator=noise).to(dtype)
    return inputs, weights, torch.ones(ROWS, PADDED), torch.tensor(slots)


@pytest.mark.parametrize("slots", [[0] * ROWS, [2] * ROWS, [0, 1, 2, 1, 0, 2]], ids=["first", "last", "mixed"])
@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "more"), CASES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_the_products_are_those_of_vllms_own_operations(name, more, slots, dimensions, dtype):
    from vllm.lora.ops.torch_ops import lora_ops

    values = operands(slots, dtype=dtype, dimensions=dimensions)
    expected = values[2].clone()
    getattr(lora_ops, name)(values[0], values[1], expected, values[3], *more)
    OPERATIONS[name](*values, *more)
    assert torch.allclose(values[2], expected, atol=1e-6)


@pytest.mark.parametrize("slots", [[-1] * ROWS, [0, -1, 1, -1, -1, 2]], ids=["none", "some"])
@pytest.mark.parametrize(("name", "more"), CASES)
def test_rows_without_an_adapter_stay_as_they_are(name, more, slots):
    """vLLM's read -1 as the last slot, which may hold anything."""
    inputs, weights, output, _ = operands(slots)
    if 2 not in slots:
        weights[-1] = float("nan")
    OPERATIONS[name](inputs, weights, output, torch.tensor(slots), *more)
    for row, slot in enumerate(slots):
        assert (output[row] == 1).all() == (slot < 0)


def test_a_batch_without_rows_and_one_of_fewer_outputs_are_computed():
    OPERATIONS["bgmv_shrink"](torch.ones(0, IN), torch.ones(SLOTS, OUT, IN), torch.ones(0, OUT), torch.tensor([]).int())
    output = torch.zeros(2, OUT)
    OPERATIONS["bgmv_expand"](torch.ones(ROWS, IN), torch.ones(SLOTS, OUT, IN), output, torch.zeros(ROWS).int())
    assert (output == IN).all()
