"""Choice of the micro-batch layout that a model computes correctly, by forwards of a few random rows.

Packed rows must have the hidden states of padded ones, and a row must not depend on the rows before it. The second is
tested apart, with the same shapes and other tokens, because it needs no allowance for rounding: recurrences and
convolutions over the flat row change the states of the next row by less than the largest state's rounding in 16 bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from example_trainer.errors import UnsupportedModel
from example_trainer.modeling import attention
from example_trainer.modeling.logprobs import head_of
from example_trainer.modeling.micro_batches import LayoutKind, Row, find_backbone, forward_hidden, pack_rows
from example_trainer.options.model import LOGIT_CHANGES

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 5e-2
LEAK_TOLERANCE = {torch.float32: 1e-3}
HALF_PRECISION_LEAK_TOLERANCE = 0.1
"""It is larger because rounding depends on the number of tokens of an expert, and may change later layers' choices."""
LOGPROB_TOLERANCE = 1e-2
"""In nats, or else the rounding of the largest logit in the model's dtype."""


def choose_layout(policy: Policy, *, padded: bool = False) -> LayoutKind:
    """Return the densest layout that gives the same hidden states as padded rows; with `padded`, return "rows"."""
    _refuse_scaled_logits(policy.hf_config)
    _refuse_chunked_attention(policy.hf_config)
    _refuse_other_head(policy)
    if padded:
        return "rows"
    if not attention.install(policy.module):
        logger.warning("%s does not support packed rows; using padded rows", type(policy.module).__name__)
        return "rows"
    varlen = attention.uses_varlen(policy.device, policy.dtype)
    wanted: LayoutKind = "packed" if varlen or policy.device.type == "cuda" else "shared"
    try:
        difference, leak = _packing_difference(policy, wanted, varlen=varlen), _leak(policy, wanted, varlen=varlen)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not varlen:
            raise
        # FlashAttention raises this for heads wider than 256, value heads of another width, GPUs before Ampere.
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("the variable-length attention kernel cannot run this model (%s); using padded rows", cause)
        return "rows"
    if difference > PROBE_TOLERANCE.get(policy.dtype, HALF_PRECISION_TOLERANCE):
        logger.warning(
            "packed rows differ from padded ones by %.1e of the largest state; using padded rows", difference
        )
        return "rows"
    if leak > LEAK_TOLERANCE.get(policy.dtype, HALF_PRECISION_LEAK_TOLERANCE):
        logger.warning("states of a packed row depend on the row before it, by %.1e; using padded rows", leak)
        return "rows"
    return wanted


def _refuse_scaled_logits(hf_config: Any) -> None:
    """Raise for models that change the logits after the head: the chunked head does not, so logprobs would be wrong."""
    text = hf_config.get_text_config()
    for name, neutral in LOGIT_CHANGES:
        value = getattr(text, name, neutral)
        if value not in (None, neutral):
            raise UnsupportedModel(f"the model's {name} is {value}; models that change their logits are not supported")


def _refuse_chunked_attention(hf_config: Any) -> None:
    """Raise for attention within chunks (Llama 4): packed rows have no chunks, and count temperatures along the row."""
    size = getattr(hf_config.get_text_config(), "attention_chunk_size", None)
    if size is not None:
        raise UnsupportedModel(f"the model's attention_chunk_size is {size}; attention in chunks is not supported")


def _refuse_other_head(policy: Policy) -> None:
    """Raise for models whose own logprobs are not those of their last states and head, for whatever reason."""
    if policy.sharding is not None and policy.sharding.tensor_parallel_size > 1:
        return  # a head that is divided computes no logits by itself
    tokens = torch.from_numpy(_probe_tokens(policy)[:1]).to(policy.device)
    with torch.no_grad():
        difference, largest = map(float, policy.compute(_head_difference, tokens))
    # Logits of 120, as GPT-2's, are rounded to halves in bf16. The head is not the cause of states that overflow.
    allowed = max(LOGPROB_TOLERANCE, torch.finfo(policy.dtype).eps * largest)
    if difference > allowed and math.isfinite(largest):
        raise UnsupportedModel(
            f"{type(policy.module).__name__} computes other logprobs than its last states and head give, by "
            f"{difference:.2g} nats; models that change their logits are not supported"
        )


def _head_difference(module: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest difference of the logprobs of `tokens` `[1, L]`, the module's and those by its head, and the
    largest logit.

    Both heads compute in the dtype of the model, so that they round in the same way.
    """
    weight, bias = head_of(module)
    states = find_backbone(module)(input_ids=tokens, use_cache=False).last_hidden_state[0]
    # Not by a call: the hooks of a sharded module would run a second time in its forward.
    theirs: Tensor = module.forward(input_ids=tokens, use_cache=False).logits[0].float()
    own = functional.linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype)).float()
    width = min(own.shape[1], theirs.shape[1])
    gap = own[:, :width].log_softmax(1) - theirs[:, :width].log_softmax(1)
    return gap[:-1].gather(1, tokens[0, 1:, None]).abs().max(), theirs.abs().max()


def _packing_difference(policy: Policy, layout: LayoutKind, *, varlen: bool) -> float:
    """Return the largest difference of hidden states between `layout` and padded rows, over the largest state."""
    tokens = _probe_tokens(policy)
    tokens[1, :8] = tokens[0, :8]
    rows = [
        Row(tokens=tokens[at], targets=np.arange(10, length), first_target=first, group=at // 2)
        for at, length, first in ((0, 24, 0), (1, 19, 14), (2, 15, 23))
    ]
    packed, padded = (_states(policy, rows, kind, varlen=varlen) for kind in (layout, "rows"))
    return float((packed - padded).abs().max() / padded.abs().max().clamp(min=1e-6))


def _leak(policy: Policy, layout: LayoutKind, *, varlen: bool) -> float:
    """Return how far other tokens in the row before move a row's states, at the place where they move most.

    Each feature is measured by its own size, since in most models a few are many times the others.
    """
    tokens = _probe_tokens(policy)
    targets = np.arange(1, tokens.shape[1])
    after = Row(tokens=tokens[1], targets=targets, first_target=len(targets), group=1)
    found: list[Tensor] = []
    for before in (0, 2):
        row = Row(tokens=tokens[before], targets=targets, first_target=0, group=0)
        found.append(_states(policy, [row, after], layout, varlen=varlen)[len(targets) :])
    sizes = found[0].square().mean(0).sqrt().clamp(min=1e-6)
    return float(((found[0] - found[1]) / sizes).square().mean(1).sqrt().max())


def _probe_tokens(policy: Policy) -> NDArray[np.int64]:
    """Return `[3, 24]` random tokens, the same at each call."""
    module: Any = policy.module
    vocabulary = module.get_input_embeddings().weight.shape[0]
    return np.random.default_rng(0).integers(0, vocabulary, size=(3, 24))


def _states(policy: Policy, rows: Sequence[Row], layout: LayoutKind, *, varlen: bool) -> Tensor:
    """Return the `[N, H]` states that predict the rows' targets, from one micro-batch in `layout`."""
    with torch.no_grad():
        (micro,) = pack_rows(rows, 1 << 20, device=policy.device, layout=layout, varlen=varlen)
        hidden = policy.compute(forward_hidden, micro).float()
    return hidden[micro.hidden_index[micro.target_index.argsort()]]
