"""Logprobs and entropies of trained tokens from hidden states, without ever holding all logits.

The head works through the trained positions in chunks: product with the output matrix, division by the token's
temperature, normalisation, all in fp32. The backward recomputes each chunk, so that peak memory depends on the
chunk and not on vocabulary times tokens; when everything is small the probabilities are kept instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEEP_PROBABILITIES_BELOW = 1 << 23  # elements: 32 MiB in fp32
DEFAULT_CHUNK_TOKENS = 1024


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Logprob of `labels[i]` under the state `hidden[index[i]]` at `temperatures[i]`, and the entropy there.

    `hidden` is `[T, H]`, `weight` `[V, H]`, the rest `[N]`. Both results are fp32 `[N]`; gradients flow from the
    logprobs to hidden, weight and bias.
    """
    head: Any = _ChunkedHead
    logprobs, entropies = head.apply(hidden, weight, bias, index, labels, temperatures, chunk_tokens)
    return logprobs, entropies


def head_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the output head."""
    head = module.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise TypeError(f"the output head is a {type(head).__name__}; only a plain linear head can be trained")
    return head.weight, head.bias


class _ChunkedHead(torch.autograd.Function):
    """See `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(hidden)
        count, vocabulary = len(index), len(weight)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        keep = count * vocabulary <= KEEP_PROBABILITIES_BELOW and any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        head = weight.to(compute)
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logs = _log_softmax(hidden[index[part]].to(compute), head, bias, temperatures[part])
            logprobs[part] = logs.gather(1, labels[part, None]).squeeze(1)
            probabilities = logs.exp()
            # A logit of -inf has probability 0 and no entropy, where 0 * -inf would be NaN.
            entropies[part] = -(probabilities * logs.clamp_(min=torch.finfo(logs.dtype).min)).sum(1)
            if keep:
                kept.append(probabilities)
        ctx.save_for_backward(hidden, weight, bias, index, labels, temperatures, *kept)
        ctx.chunk_tokens = chunk_tokens
        ctx.compute = compute
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, index, labels, temperatures, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if needs_bias else None
        head = weight.to(ctx.compute)
        for number, start in enumerate(range(0, len(index), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            states = hidden[index[part]].to(ctx.compute)
            logits_gradient = (
                kept[number] if kept else _log_softmax(states, head, bias, temperatures[part]).exp()
            ).neg()
            logits_gradient.scatter_add_(1, labels[part, None], torch.ones_like(logits_gradient[:, :1]))
            logits_gradient *= (gradients[0][part] / temperatures[part])[:, None]
            if grad_hidden is not None:
                grad_hidden.index_add_(0, index[part], logits_gradient @ head.float())
            if grad_weight is not None:
                grad_weight.addmm_(logits_gradient.t(), states.float())
            if grad_bias is not None:
                grad_bias += logits_gradient.sum(0)
        return _cast(grad_hidden, hidden), _cast(grad_weight, weight), grad_bias, None, None, None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype the server multiplies in: autocast's where it is on, else that of the states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _log_softmax(states: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """fp32 log-probabilities `[n, V]`; a half-precision product accumulates into fp32 without rounding between."""
    with torch.autocast(states.device.type, enabled=False):
        if states.is_cuda and states.dtype != torch.float32:
            logits = torch.mm(states, weight.t(), out_dtype=torch.float32)
        else:
            logits = states.float() @ weight.float().t()
        if bias is not None:
            logits += bias.float()
        return (logits / temperatures[:, None]).log_softmax(1)


def _cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)
