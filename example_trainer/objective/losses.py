"""Policy-gradient losses over a flat list of trained tokens; they use `ratios` and `kl_divergence`.

Each loss gives one value per token; the step's loss is their sum weighted by `token_weights`, which contain the
denominators of the whole optimizer step. So the rows can be split into micro-batches anywhere and gradients stay the
same, as long as the tokens of one sequence stay together. Probabilities, ratios and losses are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from example_trainer.objective.kl_divergence import DistillForm, KlEstimator, forward_kl, kl_estimates
from example_trainer.objective.ratios import (
    MismatchCorrection,
    log_ratios,
    masked_weights,
    mismatch_weights,
    off_policy_mask,
    sequence_means,
    staleness_weights,
    truncated_weights,
)
from example_trainer.objective.surrogates import (
    cispo_losses,
    dppo_keeps,
    dppo_losses,
    gmpo_losses,
    m2po_losses,
    naive_losses,
    sapo_losses,
    vespo_losses,
    weighted_losses,
)
from example_trainer.options.objective import CLIPPED_LOSSES, SEQUENCE_RATIO_LOSSES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """The inputs of a loss: `[N]` tensors on one device over the trained tokens of some whole sequences."""

    logprobs: Tensor
    """Logprobs under the policy in training, with gradient, at the sampling temperature."""
    entropies: Tensor
    """Entropies of the whole distribution at each token, in nats, with gradient."""
    rollout_logprobs: Tensor
    """Logprobs under the policy that sampled, as the sampler computed them."""
    advantages: Tensor
    sequences: Tensor
    """Sequence number of each token; any integers."""
    proximal_logprobs: Tensor | None = None
    """Logprobs under the weights before the batch's first update; None if these weights are still current."""
    reference_logprobs: Tensor | None = None
    truncated_sampling: Tensor | None = None
    """Boolean: True where the sampled distribution was truncated (top-p or similar) to tokens that are not known."""
    ages: Tensor | None = None
    """Age in steps of the policy version that sampled each token; negative where it is unknown."""
    trusted: Tensor | None = None
    """Boolean: False at tokens that `m2po` leaves out of its batch; None for other losses."""
    teacher_logprobs: Tensor | None = None
    """`[N, K]` logprobs of the teacher's tokens; -inf where there is none."""
    student_logprobs: Tensor | None = None
    """`[N, K]` logprobs of the same tokens under the policy in training, with gradient."""
    teacher_temperatures: Tensor | None = None
    """`[N]` temperatures at which the teacher is compared with the student."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The terms of a token's loss and their bounds: each field has the meaning of the option with the same name."""

    loss_type: str = "grpo"
    own_loss: OwnLoss | None = None
    """User-defined loss that replaces the surrogate of `loss_type`."""
    fused_clip: FusedClip | None = None
    """Compiled `clipped_losses` of these settings, from `[N]` log-ratios and advantages; None for plain operations."""
    importance_sampling: Literal["clip", "truncated", "masked"] = "clip"
    """Form of the off-policy correction by one ratio, policy to sampler."""
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = 3.0
    cispo_cap: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    m2_threshold: float = 0.04
    tis_cap: float = 2.0
    tis_floor: float = 0.0
    log_ratio_clamp: float = 20.0
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """The denominator of the surrogate's ratio: the sampler's logprobs, or the trainer's before the first update."""
    mismatch_correction: MismatchCorrection = "none"
    """With recomputed old logprobs: form of the weight from the ratio proximal policy to sampler."""
    off_policy_threshold: float | None = None
    staleness_mask: int | None = None
    staleness_decay: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0
    distill: DistillForm = "none"
    distill_coef: float = 1.0
    distill_temperature: float | None = None

    @property
    def weighs_sampler(self) -> bool:
        """True if every token is already weighted by a bounded ratio to the sampler."""
        return self.importance_sampling != "clip" or self.mismatch_correction != "none"


FusedClip: TypeAlias = Callable[[Tensor, Tensor], Tensor]

OwnLoss: TypeAlias = Callable[[LossInputs, LossSettings], Tensor]
"""A user-defined loss: it returns `[N]` values with gradient, one per trained token; the trainer averages them."""


def token_losses(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the `[N]` loss of each trained token: the sum of its `loss_terms`."""
    return torch.stack(list(loss_terms(inputs, settings).values())).sum(0)


def loss_terms(inputs: LossInputs, settings: LossSettings) -> dict[str, Tensor]:
    """Return `[N]` losses by term: `policy` always; `kl`, `entropy` and `distill` if enabled and their inputs exist."""
    terms = {"policy": policy_losses(inputs, settings)}
    if settings.kl_coef and (divergence := reference_kl(inputs, settings)) is not None:
        if settings.kl_bias_correction:
            ratios = surrogate_log_ratios(inputs, settings).exp()
            # k1 has the divergence's gradient by itself, and would get it twice.
            divergence = divergence * (ratios.detach() if settings.kl_estimator == "k1" else ratios)
        terms["kl"] = settings.kl_coef * divergence
    if settings.entropy_coef:
        terms["entropy"] = -settings.entropy_coef * inputs.entropies.float()
    if settings.distill == "forward_kl" and inputs.teacher_logprobs is not None:
        assert inputs.student_logprobs is not None, "the student's logprobs of the teacher's tokens are missing"
        assert inputs.teacher_temperatures is not None
        found = forward_kl(inputs.student_logprobs, inputs.teacher_logprobs, inputs.teacher_temperatures)
        terms["distill"] = settings.distill_coef * found
    return terms


def policy_losses(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the `[N]` surrogate of the loss type, times the weights and masks for mismatch and staleness."""
    surrogate = settings.own_loss or _surrogate
    losses = surrogate(inputs, settings)
    if inputs.truncated_sampling is not None and not settings.weighs_sampler:
        losses = torch.where(inputs.truncated_sampling, _weighed_by_sampler(inputs, settings), losses)
    if settings.mismatch_correction != "none":
        losses = losses * mismatch_of(inputs, settings)
    if (keep := off_policy_keeps(inputs, settings)) is not None:
        losses = losses * keep
    weights = staleness_of(inputs, settings)
    return losses if weights is None else losses * weights


def reference_kl(inputs: LossInputs, settings: LossSettings) -> Tensor | None:
    """Return `[N]` estimates of the divergence from the reference policy; None without its logprobs."""
    if inputs.reference_logprobs is None:
        return None
    return kl_estimates(inputs.logprobs, inputs.reference_logprobs, settings.kl_estimator, settings.log_ratio_clamp)


def off_policy_keeps(inputs: LossInputs, settings: LossSettings) -> Tensor | None:
    """Return `[N]` booleans, False at tokens that the off-policy mask leaves out; None without a threshold."""
    threshold = settings.off_policy_threshold
    if threshold is None:
        return None
    return off_policy_mask(inputs.logprobs, inputs.rollout_logprobs, inputs.advantages, inputs.sequences, threshold)


def staleness_of(inputs: LossInputs, settings: LossSettings) -> Tensor | None:
    """Return `[N]` weights by the age of each token's policy version; None if age makes no difference."""
    if inputs.ages is None or (settings.staleness_mask is None and settings.staleness_decay == 1.0):
        return None
    return staleness_weights(inputs.ages, settings.staleness_mask, settings.staleness_decay)


def surrogate_log_ratios(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the `[N]` log-ratios that the surrogate clips or weights by, per token or as their mean per sequence."""
    logs = log_ratios(inputs.logprobs, old_logprobs(inputs, settings), settings.log_ratio_clamp)
    return sequence_means(logs, inputs.sequences) if settings.loss_type in SEQUENCE_RATIO_LOSSES else logs


def old_logprobs(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the logprobs in the denominator of the surrogate's ratio."""
    if settings.old_logprobs == "rollout":
        return inputs.rollout_logprobs
    return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs


def mismatch_of(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return `[N]` weights from the ratio of the trainer's own old logprobs to the sampler's."""
    return mismatch_weights(
        old_logprobs(inputs, settings),
        inputs.rollout_logprobs,
        inputs.sequences,
        settings.mismatch_correction,
        floor=settings.tis_floor,
        cap=settings.tis_cap,
        clamp=settings.log_ratio_clamp,
    )


def _surrogate(inputs: LossInputs, settings: LossSettings) -> Tensor:
    logs, advantages = surrogate_log_ratios(inputs, settings), inputs.advantages
    if settings.fused_clip is not None:
        return settings.fused_clip(logs, advantages)
    ratios = logs.exp()
    if settings.importance_sampling != "clip":
        bound = truncated_weights if settings.importance_sampling == "truncated" else masked_weights
        return weighted_losses(inputs.logprobs, bound(ratios, settings.tis_floor, settings.tis_cap), advantages)
    if settings.loss_type == "cispo":
        return cispo_losses(inputs.logprobs, ratios, advantages, settings.cispo_cap)
    if settings.loss_type in CLIPPED_LOSSES:
        return clipped_losses(ratios, advantages, settings)
    return _soft_surrogate(inputs, logs, settings)


def _soft_surrogate(inputs: LossInputs, logs: Tensor, settings: LossSettings) -> Tensor:
    """Return the loss of the types that do not clip a token's ratio on both sides, from `[N]` log-ratios `logs`."""
    advantages = inputs.advantages
    if settings.loss_type == "dppo":
        low, high, cap = settings.clip_eps_low, settings.clip_eps_high, settings.cispo_cap
        return dppo_losses(inputs.logprobs, logs.exp(), advantages, low=low, high=high, cap=cap)
    if settings.loss_type == "sapo":
        return sapo_losses(logs.exp(), advantages, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    if settings.loss_type == "m2po":
        return m2po_losses(logs.exp(), advantages, inputs.trusted)
    if settings.loss_type == "gmpo":
        return gmpo_losses(logs, advantages, inputs.sequences, settings.clip_eps_low, settings.clip_eps_high)
    if settings.loss_type == "vespo":
        positive = settings.vespo_k_pos, settings.vespo_lambda_pos
        negative = settings.vespo_k_neg, settings.vespo_lambda_neg
        clamp = settings.log_ratio_clamp
        return vespo_losses(inputs.logprobs, logs, advantages, inputs.sequences, positive, negative, clamp)
    return naive_losses(inputs.logprobs, advantages)


def _weighed_by_sampler(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the loss for top-p or like sampling: its biased ratio to the sampler is a truncated weight, no clip."""
    ratios = log_ratios(inputs.logprobs, inputs.rollout_logprobs, settings.log_ratio_clamp).exp()
    return weighted_losses(
        inputs.logprobs, truncated_weights(ratios, settings.tis_floor, settings.tis_cap), inputs.advantages
    )


def clipped_losses(ratios: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """Return PPO's clipped loss: the pessimistic minimum, bounded below for negative advantages (dual clip).

    A > 0: no gradient once the ratio is above 1 + high. A < 0: none once it is below 1 - low, and none above
    `dual_clip`, where a single stale token could otherwise dominate the step (Schulman et al. 2017; Ye et al. 2020).
    """
    bounded = ratios.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)
    objective = torch.minimum(ratios * advantages, bounded * advantages)
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return -objective


def is_clipped(ratios: Tensor, advantages: Tensor, settings: LossSettings, *, logprobs: Tensor | None = None) -> Tensor:
    """Return a mask of the bounded tokens: clip and mask remove their gradient, truncation bounds their weight.

    The policy's own `logprobs` are needed for `dppo`, which bounds probabilities and not their ratio.
    """
    if settings.importance_sampling != "clip":
        below = ratios < settings.tis_floor
        return below | (ratios > settings.tis_cap)
    if settings.loss_type == "cispo":
        return ratios > settings.cispo_cap
    if settings.loss_type == "dppo" and logprobs is not None:
        return ~dppo_keeps(logprobs, ratios, advantages, settings.clip_eps_low, settings.clip_eps_high)
    if settings.loss_type == "gmpo":
        logs = ratios.log()
        too_high, too_low = logs > settings.clip_eps_high, logs < -settings.clip_eps_low
        return ((advantages > 0) & too_high) | ((advantages < 0) & too_low)
    if settings.loss_type not in CLIPPED_LOSSES:
        return torch.zeros_like(ratios, dtype=torch.bool)
    above = (advantages > 0) & (ratios > 1.0 + settings.clip_eps_high)
    below = (advantages < 0) & (ratios < 1.0 - settings.clip_eps_low)
    beyond = (advantages < 0) & (ratios > (settings.dual_clip or float("inf")))
    return above | below | beyond


def token_weights(
    trained_counts: Tensor, aggregation: Literal["token", "sequence", "constant"], constant_length: int
) -> Tensor:
    """Return the weight of each trained token in the step's loss, given each sequence's number of trained tokens.

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """Arrays `[N]` over all trained tokens of a batch."""

    labels: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    sequences: Tensor
    """Index of the token's row."""
    versions: Tensor
    """Policy version the token was sampled under; -1 if the group does not say."""
    version_bounds: Tensor
    """The same, but for unknown versions the one at arrival at the broker: a bound on the token's staleness."""
    ages: Tensor | None = None
    """Age in steps of the token's policy version when its batch is trained, -1 if unknown; None before that."""
    reference_logprobs: Tensor | None = None
    """Logprobs under the reference policy; NaN where not yet computed, None if not needed or not known."""
    proximal_logprobs: Tensor | None = None
    """Logprobs under the weights before the batch's first update, once the learner has computed them."""
    truncated_sampling: Tensor | None = None
    """Boolean, True where a group was sampled with top-p or similar and no mask is known; None if no group was."""
    mask_ids: Tensor | None = None
    """[M] ids of the tokens that the draws could choose from, token after token; None if no sampling mask is known."""
    mask_bounds: Tensor | None = None
    """[N + 1] places in `mask_ids` at which each token's mask begins and ends; an empty one stands for all tokens."""
    trusted: Tensor | None = None
    """Boolean, False at tokens that `m2po` leaves out; None for other losses, and before it is known."""
    teacher_ids: Tensor | None = None
    """[N, K] token ids named by a teacher; None if no sequence has a teacher."""
    teacher_logprobs: Tensor | None = None
    """[N, K] logprobs of these tokens, -inf if there are fewer than K."""

    def to(self, device: torch.device) -> Targets:
        tensors = {name: getattr(self, name) for name in self.__slots__}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return Targets(**moved)

    def __len__(self) -> int:
        return len(self.labels)
