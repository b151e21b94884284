"""Probability ratios between policies, and the weights and masks made of them.

Three policies meet in a step: the one being trained, the one the step began with ("proximal"), and the sampler's, whose
weights may be older and whose arithmetic is another. All ratios are fp32 `[N]` over trained tokens; sequence-level
ones are length-normalised, since the same cap on a product would mean other things for short and long answers.

Divergence from a reference policy: estimates on sampled tokens, and the coefficient that holds it at a target.

Estimators after J. Schulman, "Approximating KL Divergence" (2020); the controller after Ziegler et al. (2019, section
2.2).

Learning from a teacher's logprobs at the student's own tokens (on-policy distillation).

A group may carry, for each position, the ids of some tokens and the teacher's logprobs of them. Two uses:
`forward_kl` pulls the student's distribution towards the teacher's over those ids (Hinton et al. 2015, on student
samples as in Agarwal et al. 2024); `reverse_kl` credits each sampled token with log pi_teacher - log pi_rollout, the
policy gradient of the reverse divergence. Missing entries have a logprob of -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


KlEstimator = Literal["k1", "k3"]

MAX_RELATIVE_ERROR = 0.2

LARGEST_FACTOR = 100.0


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator, clamp: float) -> Tensor:
    """`[N]` estimates of KL(policy, reference) at sampled tokens.

    k3: `exp(d) - d - 1` with d = log pi_ref - log pi, never negative. k1: `-d`, unbiased and noisy. The gradient of
    k1 itself averages to nothing over the policy's own samples, so k1 carries that of `d * d / 2`, whose average is
    the gradient of the divergence.
    """
    difference = (reference_logprobs.float() - logprobs.float()).clamp(-clamp, clamp)
    if estimator == "k3":
        return (difference.exp() - difference - 1.0).clamp(min=0.0)
    half_square = difference.square() / 2
    return half_square - half_square.detach() - difference.detach()


@dataclass(slots=True)
class KlController:
    """The coefficient of the divergence; with a `target` it follows the measured divergence proportionally.

    Each batch multiplies it by `1 + rate * e`, where e is the relative error bounded to a fifth. It stays within a
    factor of a hundred of where it began, so that neither a collapse nor a spike runs away with it.
    """

    coefficient: float
    target: float | None = None
    rate: float = 0.1
    initial: float = 0.0

    def __post_init__(self) -> None:
        self.initial = self.initial or self.coefficient

    def observe(self, divergence: float) -> None:
        """Take the mean divergence of a batch into account for the next."""
        if self.target is None or not math.isfinite(divergence):
            return
        error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, divergence / self.target - 1.0))
        moved = self.coefficient * (1.0 + self.rate * error)
        self.coefficient = min(max(moved, self.initial / LARGEST_FACTOR), self.initial * LARGEST_FACTOR)


DistillForm = Literal["none", "forward_kl", "reverse_kl"]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, temperature: float) -> Tensor:
    """`[N]` divergence of the student from the teacher over the teacher's `[N, K]` tokens.

    The teacher's probabilities are renormalised over the K at `temperature`; the student's are those of its whole
    vocabulary, so what it gives to other tokens counts. Rows without any entry give 0.
    """
    known = teacher_logprobs.isfinite()
    lowest = torch.finfo(torch.float32).min
    scaled = (teacher_logprobs.float() / temperature).masked_fill(~known, lowest)
    logs = scaled.log_softmax(-1)
    weights = logs.exp() * known
    terms = weights * (logs - student_logprobs.float()).masked_fill(~known, 0.0)
    return terms.sum(-1)


def teacher_credits(teacher_ids: Tensor, teacher_logprobs: Tensor, labels: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """`[N]` log pi_teacher - log pi_rollout of each sampled token; 0 where the teacher does not name it."""
    named = (teacher_ids == labels[:, None]) & teacher_logprobs.isfinite()
    found = teacher_logprobs.float().masked_fill(~named, 0.0).sum(-1) / named.sum(-1).clamp(min=1)
    return torch.where(named.any(-1), found - rollout_logprobs.float(), 0.0)
