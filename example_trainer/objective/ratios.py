"""Probability ratios between policies, and the weights and masks made of them.

Three policies meet in a step: the one being trained, the one the step began with ("proximal"), and the sampler's, whose
weights may be older and whose arithmetic is another. All ratios are fp32 `[N]` over trained tokens; sequence-level
ones are length-normalised, since the same cap on a product would mean other things for short and long answers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MismatchCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def log_ratios(logprobs: Tensor, other_logprobs: Tensor, clamp: float) -> Tensor:
    """The log-ratio log pi - log pi_other, bounded so that exp stays finite whatever a stale token brings."""
    return (logprobs.float() - other_logprobs.float()).clamp(-clamp, clamp)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean of `values` over each sequence, at each of its tokens; gradients spread over those tokens."""
    _, local, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, local, values)
    means: Tensor = sums / counts
    return means[local]


def truncated_weights(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Importance weights cut at `cap` and `floor`, so that every token keeps a bounded say (Espeholt et al. 2018)."""
    return ratios.detach().clamp(floor, cap)


def masked_weights(ratios: Tensor, floor: float, cap: float) -> Tensor:
    """Importance weights, 0 outside `[floor, cap]`: what is too far off is not learnt from at all (IcePop, MIS)."""
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
    """`[N]` weight of each token for what the trainer's arithmetic and weights differ from the sampler's.

    `correction` says per token or per sequence (the geometric mean of its tokens' ratios), and whether a ratio
    outside `[floor, cap]` is cut to it or silences its tokens.
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
    """Boolean `[N]`, False where a token's advantage is negative and its sequence has drifted away from the sampler.

    Drift is the sequence's mean of log pi_rollout - log pi; pushing further down what the policy hardly says any
    more destabilises without teaching (DeepSeek-V3.2, section on off-policy sequence masking).
    """
    drift = sequence_means(rollout_logprobs.float() - logprobs.detach().float(), sequences)
    return (advantages >= 0) | (drift <= threshold)
