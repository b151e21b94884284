"""Sampling masks: the tokens that a draw with top-p, top-k or min-p could choose from, and logprobs over these alone.

The sampler's logprob of such a token is that of its renormalised, truncated distribution. With the mask the trainer
computes the same: log pi(a) - log sum of pi(b) over the mask's tokens b, so that a ratio of both is exact
(DeepSeek-AI 2025, DeepSeek-V3.2, section 3.1, "Keep Sampling Mask").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from example_trainer.objective.losses import Targets

NO_TOKEN: Final = -1
"""The id that pads a mask."""


def labels_with_masks(targets: Targets, at: Tensor) -> Tensor:
    """Return the tokens whose logprobs are needed at `at`: `[n]`, or `[n, 1 + W]` with those of the masks."""
    own = targets.labels[at]
    if targets.sampling_masks is None:
        return own
    return torch.cat([own[:, None], targets.sampling_masks[at].clamp(min=0)], dim=1)


def over_masks(logprobs: Tensor, targets: Targets, at: Tensor) -> Tensor:
    """Return `[n]` logprobs of the sampled tokens over their masks, from those of `labels_with_masks`.

    Where no mask is known they are those over the whole vocabulary.
    """
    if targets.sampling_masks is None:
        return logprobs
    masked = targets.sampling_masks[at] != NO_TOKEN
    known = masked.any(1)
    # A row without a mask sums to 0, whose logarithm has no gradient: it gets 1, and its tokens none.
    allowed = logprobs[:, 1:].masked_fill(~masked, -torch.inf).masked_fill(~known[:, None], 0.0)
    return logprobs[:, 0] - torch.where(known, allowed.logsumexp(1), 0.0)
