"""Logprobs and entropies of trained tokens, computed from hidden states without storing all logits.

The head processes the trained positions in chunks: product with the output matrix, division by the token's
temperature, normalisation, all in fp32. The backward recomputes each chunk, so that peak memory depends on the chunk
and not on vocabulary times tokens; if everything is small, the probabilities are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

KEEP_PROBABILITIES_BELOW = 1 << 23  # elements: 32 MiB in fp32
DEFAULT_CHUNK_TOKENS = 1024
MOST_CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 26}  # 32 MiB in fp32, or 256; two such arrays at a time
BYTES_PER_LOGIT = 12  # three arrays in fp32, while an entropy's gradient is computed
BYTES_AT_THE_PRODUCT = 6  # the gradient in fp32 and in 16 bits, while it is multiplied


@dataclass(frozen=True, slots=True)
class HeadPasses:
    """The passes over a chunk's fp32 logits `[n, V]`, each as one function that a compiler can make one kernel of."""

    measure: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """From logits and labels to logprobs, which have the shape of the labels, and entropies `[n]`."""
    gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """From logits, labels and the upstream gradients of both to the gradient of the logits, `[n, V]`."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    passes: HeadPasses | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprobs of `labels[i]` from the state `hidden[index[i]]` at `temperatures[i]`, and the entropy there.

    `hidden` is `[T, H]`, `weight` `[V, H]`, `labels` `[N]` or, for several tokens at each position, `[N, K]`, the rest
    `[N]`. Logprobs have the shape of `labels`, entropies are `[N]`, both fp32; gradients flow from both to hidden,
    weight and bias. A result that no loss uses adds no cost to the backward. With `passes` these compute on the logits.
    """
    head: Any = _ChunkedHead
    logprobs, entropies = head.apply(hidden, weight, bias, index, labels, temperatures, chunk_tokens, passes)
    return logprobs, entropies


def head_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the output head."""
    head = module.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise TypeError(f"the output head is a {type(head).__name__}; only a plain linear head can be trained")
    return _gathered(head.weight), None if head.bias is None else _gathered(head.bias)


def _gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that tensor parallelism has divided; all its ranks compute the same gradients."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _ChunkedHead(torch.autograd.Function):
    """The autograd function behind `token_logprobs`."""

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
        passes: HeadPasses | None,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(hidden)
        count, vocabulary = len(index), len(weight)
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(count, dtype=torch.float32, device=hidden.device)
        keep = passes is None and count * vocabulary <= KEEP_PROBABILITIES_BELOW and any(ctx.needs_input_grad)
        in_16_bits = compute != torch.float32 and ctx.needs_input_grad[1]
        chunk_tokens = min(chunk_tokens, most_chunk_tokens(hidden.device.type, weight.shape, in_16_bits=in_16_bits))
        kept: list[Tensor] = []
        head = weight.to(compute)
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _logits(hidden[index[part]].to(compute), head, bias, temperatures[part])
            if passes is not None:
                logprobs[part], entropies[part] = passes.measure(logits, labels[part])
                continue
            normaliser = logits.logsumexp(1, keepdim=True)
            logprobs[part] = (logits.gather(1, _columns(labels[part])) - normaliser).view(labels[part].shape)
            # Probabilities times surprise, all of one sign: as the normaliser minus the expected logit, the entropy was
            # off by 3e-4 at a vocabulary of 150,000. A logit of -inf adds nothing, but 0 * -inf is NaN.
            logits.sub_(normaliser).clamp_(min=torch.finfo(logits.dtype).min)
            probabilities = logits.exp()
            entropies[part] = logits.mul_(probabilities).sum(1).neg_()
            if keep:
                kept.append(probabilities)
        ctx.save_for_backward(hidden, weight, bias, index, labels, temperatures, *kept)
        ctx.chunk_tokens = chunk_tokens
        ctx.compute = compute
        ctx.passes = passes
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
            upstream = (_tempered(gradient, part, temperatures) for gradient in gradients)
            if kept:
                logits_gradient = _logits_gradient(kept[number], labels[part], *upstream)
            else:
                logits = _logits(states, head, bias, temperatures[part])
                logits_gradient = (ctx.passes or PLAIN_PASSES).gradient(logits, labels[part], *upstream)
                del logits
            if grad_bias is not None:
                grad_bias += logits_gradient.sum(0)
            logits_gradient = logits_gradient.to(ctx.compute) if states.is_cuda else logits_gradient
            if grad_hidden is not None:
                grad_hidden.index_add_(0, index[part], _product(logits_gradient, head))
            if grad_weight is not None:
                _add_product(grad_weight, logits_gradient.t(), states)
        return _cast(grad_hidden, hidden), _cast(grad_weight, weight), grad_bias, None, None, None, None, None


def most_chunk_tokens(device_type: str, shape: Sequence[int], *, in_16_bits: bool) -> int:
    """Return the most tokens of a chunk for a head of `shape` `[V, H]`, so that its memory has a bound.

    The bound is larger on a GPU, where small products are slow. There a head trained in 16 bits (`in_16_bits`) may also
    take the `4 V H` bytes that a product would take in addition to the weight's gradient: `_add_product` makes none.
    """
    logits = MOST_CHUNK_LOGITS[device_type]
    if device_type == "cuda" and in_16_bits:
        with_a_product = BYTES_AT_THE_PRODUCT * logits + 4 * shape[0] * shape[1]
        logits = max(logits, with_a_product // BYTES_PER_LOGIT)
    return max(1, logits // shape[0])


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype that the server multiplies in: autocast's if it is on, else that of the states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """Return the fp32 logits `[n, V]` divided by the temperatures."""
    logits = _product(states, weight.t())
    if bias is not None:
        logits += bias.float()
    return logits.div_(temperatures[:, None])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in fp32; half-precision matrices on a GPU accumulate in fp32 without rounding in between."""
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and left.dtype == right.dtype != torch.float32:
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute `total += left @ right` in fp32 and in place: a product of its own would have the size of the head."""
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and left.dtype == right.dtype != torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left.float(), right.float())


def _measure(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies: sums of one sign, which come out the same in whatever order a compiler adds."""
    normaliser = logits.logsumexp(1, keepdim=True)
    logprobs = (logits.gather(1, _columns(labels)) - normaliser).view(labels.shape)
    # A logit of -inf has probability 0 and adds no entropy, but 0 * inf would be NaN.
    surprise = (normaliser - logits).clamp(max=torch.finfo(logits.dtype).max)
    return logprobs, ((-surprise).exp() * surprise).sum(1)


def _gradient(
    logits: Tensor, labels: Tensor, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None
) -> Tensor:
    return _logits_gradient(logits.softmax(1), labels, logprob_gradient, entropy_gradient)


def _logits_gradient(
    probabilities: Tensor, labels: Tensor, logprob_gradient: Tensor | None, entropy_gradient: Tensor | None
) -> Tensor:
    """Return the `[n, V]` gradient of the tempered logits, in the memory of `probabilities`, which it overwrites.

    The logprobs contribute g * (1_label - p), the entropy -g * p * (log p + H).
    """
    terms: Tensor | None = None
    if entropy_gradient is not None:
        terms = torch.xlogy(probabilities, probabilities)  # 0 where the probability is 0
        terms -= probabilities * terms.sum(1, keepdim=True)
    if logprob_gradient is None:
        gradient = probabilities.zero_()
    else:
        upstream = _columns(logprob_gradient)
        gradient = probabilities.mul_(-upstream.sum(1, keepdim=True))
        gradient.scatter_add_(1, _columns(labels), upstream)
    if terms is not None and entropy_gradient is not None:
        gradient.addcmul_(terms, entropy_gradient[:, None], value=-1.0)
    return gradient


def _tempered(gradient: Tensor | None, part: slice, temperatures: Tensor) -> Tensor | None:
    """Return a chunk's upstream gradient, divided by the temperatures as the logits were."""
    if gradient is None:
        return None
    own = temperatures[part]
    return gradient[part] / (own if gradient.ndim == 1 else own[:, None])


def _columns(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values


def _cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


PLAIN_PASSES = HeadPasses(measure=_measure, gradient=_gradient)
"""The passes operation by operation; without a compiler `measure` takes more memory than the head's own."""
