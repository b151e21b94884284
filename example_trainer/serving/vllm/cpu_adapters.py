"""The products of adapters on a CPU, which replace vLLM's.

vLLM gathers the matrix of its slot for every row of a batch: 128 rows copy each matrix 128 times, so that a step with
adapters took five times as long as one without. Here the rows of one slot are one product. vLLM also gives the rows of
requests without an adapter the slot -1, which its GPU kernels skip; its CPU code reads it as the last slot, so that a
request for the base model was computed with the adapter in that slot. Here such rows stay as they are.

vLLM knows one slot for each request where it computes logits, and computes prompt logprobs with one row for each token.
In a model whose output head takes adapters (Llama, Qwen3) the engine ended at the first prompt logprobs in a step with
several slots, whether or not an adapter changes the head. Here each row has its token's slot.

Shapes: `inputs` (rows, in), `weights` (slots, out, in) or (slots, 1, out, in), `output` (rows, at least out), `slots`
(rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch


def install_adapters_on_cpu() -> None:
    """Replace the adapter operations in each module of vLLM that has imported them for CPUs; wrap prompt logprobs."""
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for module in (lora_ops, torch_ops, punica_cpu):
        for name, compute in OPERATIONS.items():
            setattr(module, name, compute)
    CPUModelRunner._get_prompt_logprobs_dict = with_slots_of_tokens(CPUModelRunner._get_prompt_logprobs_dict)  # noqa: SLF001


def with_slots_of_tokens(get: Any) -> Any:
    """Return the runner's `_get_prompt_logprobs_dict` changed so that each row of logits has its token's slot."""

    @wraps(get)
    def getting(runner: Any, states: torch.Tensor, scheduled: dict[str, int]) -> Any:
        if not (runner.lora_config and runner.num_prompt_logprobs):
            return get(runner, states, scheduled)
        batch, model, compute = runner.input_batch, runner.model, runner.model.compute_logits
        counts = np.array([scheduled[request] for request in batch.req_ids])
        _, adapters, requests = batch.make_lora_inputs(counts, np.ones_like(counts))

        def computing(rows: torch.Tensor) -> Any:
            start = (rows.storage_offset() - states.storage_offset()) // states.stride(0)  # vLLM gives a part of it
            runner._set_active_loras(adapters[start : start + len(rows)], adapters, requests)  # noqa: SLF001
            return compute(rows)

        model.compute_logits = computing
        try:
            return get(runner, states, scheduled)
        finally:
            del model.compute_logits

    return getting


def shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, slots: torch.Tensor, scaling: float = 1.0
) -> None:
    """Write `scaling` times the product of each row with its slot's matrix to the first columns of `output`."""
    for rows, values in _products(inputs, weights, output, slots):
        output[rows, : values.shape[1]] = scaling * values


def expand(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, slots: torch.Tensor, add_inputs: bool = True
) -> None:
    """Add the products to the first columns of `output`, or write them; either may be padded to more columns."""
    width = min(weights.shape[-2], output.shape[1])
    expand_slice(inputs, weights[..., :width, :], output, slots, 0, width, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    slots: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Add the products to `slice_size` columns of `output` from `slice_offset` on, or write them there."""
    part = output[:, slice_offset : slice_offset + slice_size]
    for rows, values in _products(inputs, weights, output, slots):
        if add_inputs:
            part[rows] += values
        else:
            part[rows] = values


OPERATIONS: dict[str, Callable[..., None]] = {
    "bgmv_shrink": shrink,
    "bgmv_expand": expand,
    "bgmv_expand_slice": expand_slice,
}
"""By the names of the operations that all of vLLM's CPU functions for adapters use."""


def _products(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, slots: torch.Tensor
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """Yield the rows of each slot, and their products with its matrix in the dtype of `output`."""
    inputs, slots = inputs[: len(output)], slots[: len(output)]
    for rows, slot in _rows_by_slot(slots):
        matrix = weights[slot].reshape(weights.shape[-2:])
        yield rows, inputs[rows].to(output.dtype) @ matrix.to(output.dtype).T


def _rows_by_slot(slots: torch.Tensor) -> Iterator[tuple[slice | torch.Tensor, int]]:
    if not len(slots):
        return
    first = int(slots[0])
    if bool((slots == first).all()):  # nearly always true, and then nothing is copied
        if first >= 0:
            yield slice(None), first
        return
    for slot in sorted(set(slots.tolist())):
        if slot >= 0:
            yield slots == slot, slot
