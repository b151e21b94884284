"""Requests without an adapter in one step with an adapter's, on a CPU.

vLLM marks their rows with the slot -1. Its kernels for GPUs leave such rows out; its code for CPUs takes -1 for the
last slot, so that a request for the model itself was computed with whatever adapter lay there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

_COMPUTING = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""What all of vLLM's functions for adapters on a CPU come down to."""


def install() -> None:
    """Put the functions in place wherever vLLM's code for CPUs has imported them."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _COMPUTING:
        compute = getattr(lora_ops, name)
        if not hasattr(compute, "__wrapped__"):
            for module in (lora_ops, torch_ops, punica_cpu):
                setattr(module, name, leaving_out_rows_without_adapter(compute))


def leaving_out_rows_without_adapter(compute: Any) -> Any:
    """`compute`, whose rows of the slot -1 stay as they are."""

    @wraps(compute)
    def computing(inputs: Any, weights: Any, output: Any, slots: Any, *args: Any, **kwargs: Any) -> None:
        with_adapter = slots >= 0
        if with_adapter.all():
            compute(inputs, weights, output, slots, *args, **kwargs)
        elif with_adapter.any():
            rows = output[with_adapter]
            compute(inputs[with_adapter], weights, rows, slots[with_adapter], *args, **kwargs)
            output[with_adapter] = rows

    return computing
