"""Policy-gradient losses over a flat list of trained tokens.

Each loss gives one value a token; the step's loss is their sum under `token_weights`, which hold the
denominators of the whole optimizer step. So a micro-batch can be split anywhere and gradients stay the same.
Probabilities, ratios and losses are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """`importance_sampling` says how rollouts of an older policy are corrected."""

    loss_type: Literal["grpo", "gspo", "reinforce_with_baseline", "no_baseline"] = "grpo"
    importance_sampling: Literal["clip", "truncated"] = "clip"
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = 3.0
    tis_cap: float = 2.0
    log_ratio_clamp: float = 20.0


def token_losses(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, sequences: Tensor, settings: LossSettings
) -> Tensor:
    """`[N]` loss of each trained token; `sequences` names the sequence each token belongs to."""
    logs = log_ratios(logprobs, rollout_logprobs, settings.log_ratio_clamp)
    if settings.loss_type == "gspo":
        logs = sequence_log_ratios(logs, sequences)
    if settings.importance_sampling == "truncated":
        return truncated_losses(logprobs, logs.detach().exp(), advantages, settings.tis_cap)
    if settings.loss_type in {"grpo", "gspo"}:
        return clipped_losses(logs.exp(), advantages, settings)
    return naive_losses(logprobs, advantages)


def log_ratios(logprobs: Tensor, rollout_logprobs: Tensor, clamp: float) -> Tensor:
    """The log-ratio log pi_new - log pi_rollout, bounded so that exp stays finite whatever a stale token brings."""
    return (logprobs.float() - rollout_logprobs.float()).clamp(-clamp, clamp)


def sequence_log_ratios(logs: Tensor, sequences: Tensor) -> Tensor:
    """GSPO's ratio: the mean log-ratio of the sequence, at each of its tokens.

    Length-normalised, since a sum would make one cap mean different things for short and long answers. The value
    is the sequence's, the gradient is spread over its own tokens.
    """
    _, local, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=logs.dtype, device=logs.device).index_add(0, local, logs)
    means: Tensor = sums / counts
    return means[local]


def clipped_losses(ratios: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """PPO's pessimistic minimum for both signs of the advantage, bounded below for negative ones (dual clip).

    A > 0: no gradient once the ratio is above 1 + high. A < 0: none once it is below 1 - low, and none above
    `dual_clip`, where a single stale token could otherwise dominate the step.
    """
    bounded = ratios.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)
    objective = torch.minimum(ratios * advantages, bounded * advantages)
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return -objective


def truncated_losses(logprobs: Tensor, ratios: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """Importance-weighted policy gradient with the weight cut at `cap`: every token keeps a bounded gradient.

    The value equals the clipped loss at ratio 1; the gradient is -min(ratio, cap) * A * grad log pi.
    """
    weights = ratios.detach().clamp(max=cap)
    return -(weights * advantages) * (logprobs - logprobs.detach() + 1.0)


def naive_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE: -A * log pi, without correction for the age of the rollout."""
    return -advantages * logprobs


def is_clipped(ratios: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """Which tokens the correction bounded: no gradient under clip, a cut weight under truncation."""
    if settings.importance_sampling == "truncated":
        return ratios > settings.tis_cap
    if settings.loss_type not in {"grpo", "gspo"}:
        return torch.zeros_like(ratios, dtype=torch.bool)
    above = (advantages > 0) & (ratios > 1.0 + settings.clip_eps_high)
    below = (advantages < 0) & (ratios < 1.0 - settings.clip_eps_low)
    beyond = (advantages < 0) & (ratios > (settings.dual_clip or float("inf")))
    return above | below | beyond


def token_weights(
    trained_counts: Tensor, aggregation: Literal["token", "sequence", "constant"], constant_length: int
) -> Tensor:
    """The weight of each trained token in the step's loss, given how many tokens each sequence trains.

    token: 1 / all trained tokens of the step. sequence: each sequence's mean, averaged over sequences. constant:
    each sequence's sum over a fixed length, averaged (Dr. GRPO). Counts are those left after every mask and drop.
    """
    per_sequence = trained_counts.double()
    if aggregation == "token":
        weights = torch.full_like(per_sequence, 1.0 / max(float(per_sequence.sum()), 1.0))
    elif aggregation == "sequence":
        weights = 1.0 / (per_sequence.clamp(min=1.0) * max(len(per_sequence), 1))
    else:
        weights = torch.full_like(per_sequence, 1.0 / (constant_length * max(len(per_sequence), 1)))
    return weights.float().repeat_interleave(trained_counts)
