"""Choice of the micro-batch layout that a model computes correctly, by comparing hidden states with padded rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from example_trainer.errors import UnsupportedModel
from example_trainer.modeling import attention
from example_trainer.modeling.micro_batches import LayoutKind, Row, forward_hidden, pack_rows
from example_trainer.options.model import LOGIT_CHANGES

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 5e-2


def choose_layout(policy: Policy, *, padded: bool = False) -> LayoutKind:
    """Return the densest layout that gives the same hidden states as padded rows; with `padded`, return "rows"."""
    _refuse_scaled_logits(policy.hf_config)
    if padded:
        return "rows"
    if not attention.install(policy.module):
        logger.warning("%s does not support packed rows; using padded rows", type(policy.module).__name__)
        return "rows"
    varlen = attention.uses_varlen(policy.device, policy.dtype)
    wanted: LayoutKind = "packed" if varlen or policy.device.type == "cuda" else "shared"
    try:
        difference = _packing_difference(policy, wanted, varlen=varlen)
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
    return wanted


def _refuse_scaled_logits(hf_config: Any) -> None:
    """Raise for models that change the logits after the head: the chunked head does not, so logprobs would be wrong."""
    text = hf_config.get_text_config()
    for name, neutral in LOGIT_CHANGES:
        value = getattr(text, name, neutral)
        if value not in (None, neutral):
            raise UnsupportedModel(f"the model's {name} is {value}; models that change their logits are not supported")


def _packing_difference(policy: Policy, layout: LayoutKind, *, varlen: bool) -> float:
    """Return the largest difference of hidden states between `layout` and padded rows, over the largest state."""
    module: Any = policy.module
    vocabulary = module.get_input_embeddings().weight.shape[0]
    tokens = np.random.default_rng(0).integers(0, vocabulary, size=(3, 24))
    tokens[1, :8] = tokens[0, :8]
    rows = [
        Row(tokens=tokens[at], targets=np.arange(10, length), first_target=first, group=at // 2)
        for at, length, first in ((0, 24, 0), (1, 19, 14), (2, 15, 23))
    ]
    states: list[Tensor] = []
    with torch.no_grad():
        kinds: tuple[LayoutKind, LayoutKind] = (layout, "rows")
        for kind in kinds:
            (micro,) = pack_rows(rows, 1 << 20, device=policy.device, layout=kind, varlen=varlen)
            hidden = policy.compute(forward_hidden, micro).float()
            states.append(hidden[micro.hidden_index[micro.target_index.argsort()]])
    return float((states[0] - states[1]).abs().max() / states[1].abs().max().clamp(min=1e-6))
