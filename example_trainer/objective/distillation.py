"""Learning from a teacher's logprobs at the student's own tokens (on-policy distillation).

A group may carry, for each position, the ids of some tokens and the teacher's logprobs of them. Two uses:
`forward_kl` pulls the student's distribution towards the teacher's over those ids (Hinton et al. 2015, on student
samples as in Agarwal et al. 2024); `reverse_kl` credits each sampled token with log pi_teacher - log pi_rollout, the
policy gradient of the reverse divergence. Missing entries have a logprob of -inf.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
