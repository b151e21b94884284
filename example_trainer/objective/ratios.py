"""Probability ratios between policies at sampled tokens, and the weights and masks that follow from them.

A step compares three policies: the one being trained, the one before the step ("proximal"), and the sampler's, whose
weights may be older and whose arithmetic differs. All ratios are fp32 `[N]` over trained tokens; sequence-level ones
are length-normalised, since one cap on a product would have different effects on short and long answers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MismatchCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def log_ratios(logprobs: Tensor, other_logprobs: Tensor, clamp: float) -> Tensor:
    """Return the log-ratio log pi - log pi_other, clamped so that exp stays finite even for very stale tokens."""
    return (logprobs.float() - other_logprobs.float()).clamp(-clamp, clamp)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """Return at each token the mean of `values` over its sequence; gradients spread over the sequence's tokens."""
    _, local, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, local, values)
    means: Tensor = sums / counts
    return means[local]


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Return at each token the sum of `values` over its sequence; gradients go to all of the sequence's tokens."""
    _, local = torch.unique(sequences, return_inverse=True)
    sums = torch.zeros_like(values).index_add(0, local, values)
    return sums[local]


def truncated_weights(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Return importance weights clamped to `[floor, cap]`, which bounds a token's influence (Espeholt et al. 2018)."""
    return ratios.detach().clamp(floor, cap)


def masked_weights(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Return importance weights, 0 outside `[floor, cap]`, so that far-off tokens have no effect (IcePop, MIS)."""
    weights = ratios.detach()
    return weights.masked_fill((weights < floor) | (weights > cap), 0.0)


def mismatch_weights(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequences: Tensor,
    correction: MismatchCorrection,
    *,
    floor: float,
    cap: float,
    clamp: float,
) -> Tensor:
    """Return the `[N]` weight of each token that corrects for the trainer's and sampler's different logprobs.

    `correction` says if ratios are per token or per sequence (the geometric mean of its tokens' ratios), and if a
    ratio outside `[floor, cap]` is clamped to it or sets its tokens' weights to 0.
    """
    logs = log_ratios(proximal_logprobs.detach(), rollout_logprobs, clamp)
    if correction == "none":
        return torch.ones_like(logs)
    if correction.startswith("sequence"):
        logs = sequence_means(logs, sequences)
    bound = truncated_weights if correction.endswith("truncate") else masked_weights
    return bound(logs.exp(), floor, cap)


def off_policy_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequences: Tensor, threshold: float
) -> Tensor:
    """Return a Boolean `[N]`, False where the advantage is negative and the sequence drifted beyond `threshold`.

    Drift is the sequence's mean of log pi_rollout - log pi. Lowering the probability of tokens that are already
    unlikely destabilises training without benefit (DeepSeek-V3.2, section on off-policy sequence masking).
    """
    drift = sequence_means(rollout_logprobs.float() - logprobs.detach().float(), sequences)
    return (advantages >= 0) | (drift <= threshold)


def staleness_weights(ages: Tensor, mask_above: int | None, decay: float) -> Tensor:
    """Return `[N]` weights by the age in steps of each token's policy version: decay^age, and 0 above `mask_above`.

    A negative age stands for an unknown version, whose weight is 1.
    """
    weights = decay ** ages.clamp(min=0).float()
    return weights if mask_above is None else torch.where(ages > mask_above, 0.0, weights)
