"""What a step did, computed once from arrays over all its trained tokens.

Ratios are reported as they are, before any clip or truncation, so that the correction does not hide what it
corrects. Alignment compares logprobs under the very weights a token was sampled with; anything but noise there
means that trainer and server hold different weights or count positions differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.objective.losses import LossSettings, is_clipped, log_ratios, sequence_log_ratios

LOGPROB_GAP_LIMIT = 2.0


def policy_metrics(
    logprobs: Tensor,
    entropies: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    settings: LossSettings,
) -> dict[str, float]:
    """Ratio, clip, entropy, divergence and logprob statistics over `[N]` trained tokens."""
    logs = log_ratios(logprobs, rollout_logprobs, settings.log_ratio_clamp)
    ratios = logs.exp()
    judged = sequence_log_ratios(logs, sequences).exp() if settings.loss_type == "gspo" else ratios
    clipped = is_clipped(judged, advantages, settings)
    return {
        names.MEAN_RATIO: _mean(ratios),
        "grpo/max_ratio": float(ratios.max()),
        names.CLIPPED_FRACTION: _mean(clipped.float()),
        names.TRAIN_ENTROPY: _mean(entropies),
        # k3: an unbiased estimate of KL(rollout, policy) on rollout samples that is never negative.
        names.TRAIN_KL: _mean((ratios - 1.0 - logs).clamp(min=0.0)),
        "train/pos_logp": _mean(logprobs[advantages > 0]),
        "train/neg_logp": _mean(logprobs[advantages < 0]),
        "logprobs/training_mean": _mean(logprobs),
        "logprobs/training_std": _std(logprobs),
        "logprobs/inference_mean": _mean(rollout_logprobs),
        "logprobs/inference_std": _std(rollout_logprobs),
    }


def alignment_metrics(differences: Tensor) -> dict[str, float]:
    """Trainer minus sampler logprob, of tokens whose own weights were used; nothing when there are none."""
    if not len(differences):
        return {names.ALIGNMENT_TOKENS: 0.0}
    return {
        names.ALIGNMENT_TOKENS: float(len(differences)),
        names.ALIGNMENT_DIFF_MEAN: _mean(differences),
        names.ALIGNMENT_DIFF_ABS_MEAN: _mean(differences.abs()),
        names.ALIGNMENT_DIFF_MAX: float(differences.abs().max()),
    }


def reward_metrics(rewards: Sequence[float], response_lengths: Sequence[int]) -> dict[str, float]:
    """Over every sequence of the batch, those included that teach nothing."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    lengths = torch.tensor(list(response_lengths), dtype=torch.float64)
    return {
        names.REWARD_MEAN: _mean(values),
        names.REWARD_STD: _std(values),
        names.RESPONSE_LENGTH_MEAN: _mean(lengths),
    }


def staleness_metrics(versions: Tensor, steps_by_version: Mapping[int, int], weights_step: int) -> dict[str, float]:
    """Age of trained tokens in trainer steps; versions that nothing is known of are left out."""
    seen, counts = torch.unique(versions, return_counts=True)
    ages = [
        (max(weights_step - steps_by_version[version], 0), count)
        for version, count in zip(seen.tolist(), counts.tolist(), strict=True)
        if version in steps_by_version
    ]
    if not ages:
        return {}
    tokens = sum(count for _, count in ages)
    return {
        names.STALENESS_MEAN: sum(age * count for age, count in ages) / tokens,
        names.STALENESS_MAX: float(max(age for age, _ in ages)),
    }


def logprob_warnings(rollout_logprobs: Tensor, logprobs: Tensor) -> list[str]:
    """Signs that rollout logprobs do not belong to the tokens they are laid against, in searchable words."""
    reference, trained = _mean(rollout_logprobs), _mean(logprobs)
    found: list[str] = []
    if reference > 0:
        found.append(
            f"ref_logprobs avg {reference:.3f} (should be negative!); this suggests that inference_logprobs are not "
            "aligned with the tokens"
        )
    if abs(reference - trained) > LOGPROB_GAP_LIMIT:
        found.append(
            f"Logprob gap: ref={reference:.3f}, train={trained:.3f}; the rollouts were sampled from other weights, "
            "at another temperature, or their logprobs are shifted"
        )
    return found


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _std(values: Tensor) -> float:
    return float(values.double().std(correction=0)) if len(values) else 0.0
