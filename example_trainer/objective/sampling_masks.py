"""Sampling masks: the tokens that a draw with top-p, top-k or min-p could choose from, and logprobs over these alone.

The sampler's logprob of such a token is that of its renormalised, truncated distribution. With the mask the trainer
computes the same: log pi(a) - log sum of pi(b) over the mask's tokens b, so that a ratio of both is exact
(DeepSeek-AI 2025, DeepSeek-V3.2, section 3.1, "Keep Sampling Mask").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from example_trainer.objective.losses import Targets


def labels_with_masks(targets: Targets, at: Tensor) -> Tensor:
    """Return the tokens whose logprobs are needed at `at`: `[n]`, or `[n, 1 + W]` with those of the masks.

    W is the width of the widest mask there; a narrower one is filled with any id.
    """
    own = targets.labels[at]
    if targets.mask_ids is None or targets.mask_bounds is None:
        return own
    begins = targets.mask_bounds[at]
    counts = targets.mask_bounds[at + 1] - begins
    width = int(counts.max()) if len(counts) else 0
    if not width:
        return own
    places = begins[:, None] + torch.arange(width, device=at.device)
    return torch.cat([own[:, None], targets.mask_ids[places.clamp(max=len(targets.mask_ids) - 1)]], dim=1)


def over_masks(logprobs: Tensor, targets: Targets, at: Tensor) -> Tensor:
    """Return `[n]` logprobs of the sampled tokens over their masks, from those of `labels_with_masks`.

    Where no mask is known they are those over the whole vocabulary.
    """
    if logprobs.ndim == 1 or targets.mask_bounds is None:
        return logprobs
    counts = targets.mask_bounds[at + 1] - targets.mask_bounds[at]
    known = counts > 0
    masked = torch.arange(logprobs.shape[1] - 1, device=at.device) < counts[:, None]
    # A row without a mask would sum to 0, whose logarithm has no gradient: it is filled with zeros and not used.
    allowed = logprobs[:, 1:].masked_fill(~masked, -torch.inf).masked_fill(~known[:, None], 0.0)
    return logprobs[:, 0] - torch.where(known, allowed.logsumexp(1), 0.0)
