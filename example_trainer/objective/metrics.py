"""Metrics of the objective, computed once per step from arrays over all its trained tokens.

Ratios are reported before any clip or truncation, so that the correction does not hide the mismatch it corrects.
Alignment compares logprobs under exactly the weights a token was sampled with; anything but noise there
means that trainer and server have different weights or count positions differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.objective.losses import (
    LossInputs,
    LossSettings,
    is_clipped,
    mismatch_of,
    off_policy_keeps,
    old_logprobs,
    reference_kl,
    staleness_of,
    surrogate_log_ratios,
)
from example_trainer.objective.ratios import log_ratios, sequence_means
from example_trainer.objective.surrogates import outward_squares


def policy_metrics(inputs: LossInputs, settings: LossSettings) -> dict[str, float]:
    """Return ratio, clip, entropy, divergence and logprob statistics over `[N]` trained tokens."""
    logprobs, rollout, advantages = inputs.logprobs, inputs.rollout_logprobs, inputs.advantages
    logs = log_ratios(logprobs, rollout, settings.log_ratio_clamp)
    ratios = logs.exp()
    clipped = _clipped(inputs, settings)
    weights = staleness_of(inputs, settings)
    found = {
        names.MEAN_RATIO: _mean(ratios),
        names.MAX_RATIO: float(ratios.max()),
        names.CLIPPED_FRACTION: _mean(clipped.float()),
        names.ZERO_GRADIENT_FRACTION: _mean(_without_gradient(inputs, settings, clipped).float()),
        names.TRAIN_ENTROPY: _mean(inputs.entropies),
        # k3: an unbiased estimate of KL(rollout, policy) on rollout samples that is never negative.
        names.TRAIN_KL: _mean((ratios - 1.0 - logs).clamp(min=0.0)),
        names.TRAIN_POS_LOGP: _mean(logprobs[advantages > 0]),
        names.TRAIN_NEG_LOGP: _mean(logprobs[advantages < 0]),
        names.LOGPROBS_TRAINING_MEAN: _mean(logprobs),
        names.LOGPROBS_TRAINING_STD: _std(logprobs),
        names.LOGPROBS_INFERENCE_MEAN: _mean(rollout),
        names.LOGPROBS_INFERENCE_STD: _std(rollout),
    }
    if weights is not None:
        found[names.STALENESS_WEIGHT] = _mean(weights)
    if inputs.trusted is not None:
        squares, outward = outward_squares(logs, advantages)
        found[names.SECOND_MOMENT] = _mean(squares[outward])
        found[names.SECOND_MOMENT_KEPT] = _mean(squares[outward & inputs.trusted])
    return found | _mismatch_metrics(inputs, settings) | _reference_metrics(inputs, settings)


def _clipped(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return a mask of the tokens that the loss clips, masks or bounds by their ratio."""
    if inputs.trusted is not None:
        return ~inputs.trusted
    ratios = surrogate_log_ratios(inputs, settings).exp()
    clipped = is_clipped(ratios, inputs.advantages, settings, logprobs=inputs.logprobs)
    if inputs.truncated_sampling is None or settings.weighs_sampler:
        return clipped
    return clipped & ~inputs.truncated_sampling  # the loss weighs these instead


def _without_gradient(inputs: LossInputs, settings: LossSettings, clipped: Tensor) -> Tensor:
    """Return a mask of the tokens whose surrogate has no gradient."""
    silenced = inputs.advantages == 0
    # A truncated weight still leaves a gradient; the clip and the mask leave none.
    if settings.importance_sampling != "truncated" and settings.loss_type != "cispo":
        silenced = silenced | clipped
    if settings.mismatch_correction != "none":
        silenced = silenced | (mismatch_of(inputs, settings) == 0)
    if (keep := off_policy_keeps(inputs, settings)) is not None:
        silenced = silenced | ~keep
    weights = staleness_of(inputs, settings)
    return silenced if weights is None else silenced | (weights == 0)


def _mismatch_metrics(inputs: LossInputs, settings: LossSettings) -> dict[str, float]:
    """Return the ratios of trainer to sampler before any bound, and the fractions that bounds and masks affect."""
    found: dict[str, float] = {}
    if settings.old_logprobs == "recomputed":
        gap = log_ratios(old_logprobs(inputs, settings), inputs.rollout_logprobs, settings.log_ratio_clamp)
        found |= {names.MISMATCH_MEAN_RATIO: _mean(gap.exp()), names.MISMATCH_MAX_RATIO: float(gap.exp().max())}
        if settings.mismatch_correction.startswith("sequence"):
            gap = sequence_means(gap, inputs.sequences)
        bounded = (gap.exp() < settings.tis_floor) | (gap.exp() > settings.tis_cap)
        if settings.mismatch_correction != "none":
            found[names.MISMATCH_BOUNDED_FRACTION] = _mean(bounded.float())
    if (keep := off_policy_keeps(inputs, settings)) is not None:
        found[names.OFF_POLICY_FRACTION] = 1.0 - _mean(keep.float())
    return found


def _reference_metrics(inputs: LossInputs, settings: LossSettings) -> dict[str, float]:
    divergence = reference_kl(inputs, settings)
    return {} if divergence is None else {names.TRAIN_KL_REFERENCE: _mean(divergence)}


def alignment_metrics(differences: Tensor) -> dict[str, float]:
    """Return statistics of trainer minus sampler logprobs, each under the weights that sampled the token.

    Without any token only their number, 0, is returned.
    """
    if not len(differences):
        return {names.ALIGNMENT_TOKENS: 0.0}
    return {
        names.ALIGNMENT_TOKENS: float(len(differences)),
        names.ALIGNMENT_DIFF_MEAN: _mean(differences),
        names.ALIGNMENT_DIFF_ABS_MEAN: _mean(differences.abs()),
        names.ALIGNMENT_DIFF_MAX: float(differences.abs().max()),
    }


def reward_metrics(rewards: Sequence[float], response_lengths: Sequence[int]) -> dict[str, float]:
    """Return reward and length statistics over all sequences of the batch, including those left out of training."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    lengths = torch.tensor(list(response_lengths), dtype=torch.float64)
    return {
        names.REWARD_MEAN: _mean(values),
        names.REWARD_STD: _std(values),
        names.RESPONSE_LENGTH_MEAN: _mean(lengths),
    }


def token_ages(versions: Tensor, steps_by_version: Mapping[int, int], weights_step: int) -> Tensor:
    """Return `[N]` the age in trainer steps of each token's policy version, -1 where the version is unknown."""
    seen, places = torch.unique(versions, return_inverse=True)
    known = [max(weights_step - steps_by_version[v], 0) if v in steps_by_version else -1 for v in seen.tolist()]
    return torch.tensor(known, dtype=torch.long, device=versions.device)[places]


def staleness_metrics(ages: Tensor) -> dict[str, float]:
    """Return statistics of the `[N]` ages of trained tokens, their histogram, and the share of unknown versions."""
    if not len(ages):
        return {}
    known = ages[ages >= 0]
    found = {names.STALENESS_UNKNOWN: 1 - len(known) / len(ages)}
    for age, count in zip(*(each.tolist() for each in torch.unique(known, return_counts=True)), strict=True):
        name = names.STALENESS_AGE.format(steps=age_class(age))
        found[name] = found.get(name, 0.0) + count / len(ages)
    if len(known):
        found[names.STALENESS_MEAN] = _mean(known)
        found[names.STALENESS_MAX] = float(known.max())
    return found


def age_class(steps: int) -> str:
    """Return the histogram class of an age in steps: 0, 1, 2, 3, 4_to_7, 8_or_more."""
    if steps < 4:
        return str(steps)
    return "4_to_7" if steps < 8 else "8_or_more"


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _std(values: Tensor) -> float:
    return float(values.double().std(correction=0)) if len(values) else 0.0
