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
    """Logprobs of `labels[i]` under the state `hidden[index[i]]` at `temperatures[i]`, and the entropy there.

    `hidden` is `[T, H]`, `weight` `[V, H]`, `labels` `[N]` or, for several tokens at each place, `[N, K]`, the rest
    `[N]`. Logprobs have the shape of `labels`, entropies are `[N]`, both fp32; gradients flow from both to hidden,
    weight and bias. A result that no loss uses costs no backward.
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
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(count, dtype=torch.float32, device=hidden.device)
        keep = count * vocabulary <= KEEP_PROBABILITIES_BELOW and any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        head = weight.to(compute)
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logs = _log_softmax(hidden[index[part]].to(compute), head, bias, temperatures[part])
            logprobs[part] = logs.gather(1, _columns(labels[part])).view(labels[part].shape)
            probabilities = logs.exp()
            # A logit of -inf has probability 0 and no entropy, where 0 * -inf would be NaN.
            entropies[part] = -(probabilities * logs.clamp_(min=torch.finfo(logs.dtype).min)).sum(1)
            if keep:
                kept.append(probabilities)
        ctx.save_for_backward(hidden, weight, bias, index, labels, temperatures, *kept)
        ctx.chunk_tokens = chunk_tokens
        ctx.compute = compute
        ctx.set_materialize_grads(False)
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
            probabilities = kept[number] if kept else _log_softmax(states, head, bias, temperatures[part]).exp()
            upstream = (_tempered(gradient, part, temperatures) for gradient in gradients)
            logits_gradient = _logits_gradient(probabilities, labels[part], *upstream)
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


def _logits_gradient(
    probabilities: Tensor, labels: Tensor, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None
) -> Tensor:
    """`[n, V]` gradient of the tempered logits: g * (1_label - p) of logprobs, -g * p * (log p + H) of the entropy."""
    if logprob_gradient is None:
        gradient = torch.zeros_like(probabilities)
    else:
        upstream = _columns(logprob_gradient)
        gradient = probabilities * -upstream.sum(1, keepdim=True)
        gradient.scatter_add_(1, _columns(labels), upstream)
    if entropy_gradient is not None:
        terms = torch.xlogy(probabilities, probabilities)  # 0 where the probability is
        terms -= probabilities * terms.sum(1, keepdim=True)
        gradient.addcmul_(terms, entropy_gradient[:, None], value=-1.0)
    return gradient


def _tempered(gradient: Tensor | None, part: slice, temperatures: Tensor) -> Tensor | None:
    """A chunk's upstream gradient, through the division of the logits by their temperature."""
    if gradient is None:
        return None
    own = temperatures[part]
    return gradient[part] / (own if gradient.ndim == 1 else own[:, None])


def _columns(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values


def _cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)
