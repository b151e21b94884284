"""Comparisons between policies at sampled tokens: probability ratios, weights, masks, KL divergences, distillation.

A step compares three policies: the one being trained, the one before the step ("proximal"), and the sampler's, whose
weights may be older and whose arithmetic differs. All ratios are fp32 `[N]` over trained tokens; sequence-level ones
are length-normalised, since one cap on a product would have different effects on short and long answers. KL estimators
follow J. Schulman, "Approximating KL Divergence" (2020); the controller that keeps the divergence at a target follows
Ziegler et al. (2019, section 2.2).

For on-policy distillation a group may hold, at each position, some token ids and the teacher's logprobs of them, -inf
where missing. `forward_kl` pulls the student's distribution towards the teacher's over those ids (Hinton et al. 2015,
on student samples as in Agarwal et al. 2024); `reverse_kl` adds log pi_teacher - log pi_rollout to each sampled token's
advantage, which is the policy gradient of the reverse divergence. Servers give the teacher's logprobs at temperature 1,
the student's are those at which it sampled: the teacher's are tempered too, as GKD does with both distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


KlEstimator = Literal["k1", "k3"]

MAX_RELATIVE_ERROR = 0.2
LARGEST_FACTOR = 100.0
LEAST_LEFT = 1e-8
"""Least probability that is left for the tokens that a teacher does not name: fp32 sums are off by more."""


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator, clamp: float) -> Tensor:
    """Return `[N]` estimates of KL(policy, reference) at sampled tokens.

    k3: `exp(d) - d - 1` with d = log pi_ref - log pi, never negative. k1: `-d`, unbiased and noisy. The gradient of
    k1 itself averages to zero over the policy's own samples, so k1 gets the gradient of `d * d / 2`, whose average is
    the gradient of the divergence.
    """
    difference = (reference_logprobs.float() - logprobs.float()).clamp(-clamp, clamp)
    if estimator == "k3":
        return (difference.exp() - difference - 1.0).clamp(min=0.0)
    half_square = difference.square() / 2
    return half_square - half_square.detach() - difference.detach()


@dataclass(slots=True)
class KlController:
    """The controller of the KL coefficient: with a `target`, it follows the measured divergence proportionally.

    Each batch multiplies the coefficient by `1 + rate * e`, where e is the relative error, bounded to ±0.2. The
    coefficient stays within a factor of 100 of its initial value, so that a collapse or spike has a bounded effect.
    """

    coefficient: float
    target: float | None = None
    rate: float = 0.1
    initial: float = 0.0

    def __post_init__(self) -> None:
        self.initial = self.initial or self.coefficient

    def observe(self, divergence: float) -> None:
        """Adapt the coefficient for the next batch to the mean divergence of this one."""
        if self.target is None or not math.isfinite(divergence):
            return
        error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, divergence / self.target - 1.0))
        moved = self.coefficient * (1.0 + self.rate * error)
        self.coefficient = min(max(moved, self.initial / LARGEST_FACTOR), self.initial * LARGEST_FACTOR)


DistillForm = Literal["none", "forward_kl", "reverse_kl"]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, temperatures: Tensor) -> Tensor:
    """Return the `[N]` forward KL divergence of the student from the teacher over the teacher's `[N, K]` tokens.

    The teacher's probabilities are renormalised over its K tokens at `temperatures` `[N]`; the student's are over its
    whole vocabulary, so probability on other tokens raises the divergence. Rows without any entry give 0, and so do
    those with one: renormalised it is certain, and would raise the sampled token whatever its probability under the
    teacher.
    """
    known = teacher_logprobs.isfinite()
    known = known & (known.sum(-1, keepdim=True) > 1)
    lowest = torch.finfo(torch.float32).min
    scaled = (teacher_logprobs.float() / temperatures[:, None]).masked_fill(~known, lowest)
    logs = scaled.log_softmax(-1)
    weights = logs.exp() * known
    terms = weights * (logs - student_logprobs.float()).masked_fill(~known, 0.0)
    return terms.sum(-1)


def teacher_credits(
    teacher_ids: Tensor, teacher_logprobs: Tensor, labels: Tensor, rollout_logprobs: Tensor, temperatures: Tensor
) -> Tensor:
    """Return `[N]` log pi_teacher - log pi_rollout of each sampled token, the teacher's at `temperatures` `[N]`.

    A token that the teacher does not name gets the largest probability that it can have: the smallest named one, or
    what the named ones leave of 1 if that is smaller. Rows without any entry give 0.
    """
    known = teacher_logprobs.isfinite()
    logs = teacher_logprobs.float()
    left = (1.0 - logs.exp().sum(-1)).clamp(min=LEAST_LEFT).log()
    named = (teacher_ids == labels[:, None]) & known
    least = torch.minimum(logs.masked_fill(~known, torch.inf).amin(-1), left)
    own = torch.where(named.any(-1), logs.masked_fill(~named, -torch.inf).amax(-1), least)
    own = own / temperatures - _log_normalisers(logs, left, temperatures)
    return torch.where(known.any(-1), own - rollout_logprobs.float(), 0.0)


def _log_normalisers(logs: Tensor, left: Tensor, temperatures: Tensor) -> Tensor:
    """Return `[N]` logs of the sums of the teacher's tempered probabilities; the tokens not named count as one.

    An inexact sum is the same for all tokens at a position, as a baseline is: it adds variance to the gradient and no
    bias. If the teacher names one token only, the sum cannot be estimated, and its log is 0.
    """
    sums = torch.logaddexp((logs / temperatures[:, None]).logsumexp(-1), left / temperatures)
    known = (logs.isfinite().sum(-1) > 1) & (temperatures != 1.0)
    return torch.where(known, sums, 0.0)


def staleness_weights(ages: Tensor, mask_above: int | None, decay: float) -> Tensor:
    """Return `[N]` weights by the age in steps of each token's policy version: decay^age, and 0 above `mask_above`.

    A negative age stands for an unknown version, whose weight is 1.
    """
    weights = decay ** ages.clamp(min=0).float()
    return weights if mask_above is None else torch.where(ages > mask_above, 0.0, weights)
