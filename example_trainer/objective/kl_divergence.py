"""KL divergences at sampled tokens: from the reference policy, with the coefficient's controller, and from a teacher.

The estimators of the divergence from the reference follow J. Schulman, "Approximating KL Divergence" (2020); the
controller that keeps it at a target follows Ziegler et al. (2019, section 2.2). All values are fp32 `[N]` over trained
tokens.

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

KlEstimator = Literal["k1", "k3"]
DistillForm = Literal["none", "forward_kl", "reverse_kl"]

MAX_RELATIVE_ERROR = 0.2
LARGEST_FACTOR = 100.0
LEAST_LEFT = 1e-8
"""Least probability that is left for the tokens that a teacher does not name: fp32 sums are off by more."""


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator, clamp: float) -> Tensor:
    """Return `[N]` estimates of KL(policy, reference) at sampled tokens.

    k3: `exp(d) - d - 1` with d = log pi_ref - log pi, never negative. k1: `-d`, unbiased and noisy. The gradient of
    k1 itself averages to zero over the policy's own samples, so k1 gets the gradient of `d * d / 2`, whose average is
    the gradient of the divergence. Only k3's exp needs the clamp: a d far below 0 keeps its value and its gradient.
    """
    difference = reference_logprobs.float() - logprobs.float()
    if estimator == "k3":
        bounded = difference.clamp(max=clamp)
        return (bounded.exp() - bounded - 1.0).clamp(min=0.0)
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
