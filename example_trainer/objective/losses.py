"""Policy-gradient losses over a flat list of trained tokens.

Each loss gives one value a token; the step's loss is their sum under `token_weights`, which hold the
denominators of the whole optimizer step. So a micro-batch can be split anywhere and gradients stay the same, as long
as the tokens of one sequence stay together. Probabilities, ratios and losses are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from example_trainer.objective.ratios import (
    DistillForm,
    KlEstimator,
    MismatchCorrection,
    forward_kl,
    kl_estimates,
    log_ratios,
    masked_weights,
    mismatch_weights,
    off_policy_mask,
    sequence_means,
    truncated_weights,
)

CLIPPED_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "gspo"})
"""Losses with PPO's clipped surrogate; they differ in denominators, advantages and the level of the ratio."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """What a loss sees of some trained tokens, whole sequences of them: `[N]` tensors on one device."""

    logprobs: Tensor
    """Under the policy in training, with gradient, at the temperature of sampling."""
    entropies: Tensor
    """Of the whole distribution at each token, in nats, with gradient."""
    rollout_logprobs: Tensor
    """Under the policy that sampled, as the sampler computed them."""
    advantages: Tensor
    sequences: Tensor
    """Which sequence a token belongs to; any integers."""
    proximal_logprobs: Tensor | None = None
    """Under the weights the batch began with; None where these are still in place."""
    reference_logprobs: Tensor | None = None
    truncated_sampling: Tensor | None = None
    """Boolean: where top-p or the like made the sampled distribution another than the policy's own."""
    teacher_logprobs: Tensor | None = None
    """`[N, K]` of the teacher's tokens; -inf where there is none."""
    student_logprobs: Tensor | None = None
    """`[N, K]` of the same tokens under the policy in training, with gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Which terms a token's loss has, and their bounds; the fields are those of the options with the same names."""

    loss_type: str = "grpo"
    own_loss: OwnLoss | None = None
    """Replaces the surrogate of `loss_type`."""
    importance_sampling: Literal["clip", "truncated", "masked"] = "clip"
    """How rollouts of an older policy are corrected by one ratio, policy to sampler."""
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = 3.0
    cispo_cap: float = 5.0
    tis_cap: float = 2.0
    tis_floor: float = 0.0
    log_ratio_clamp: float = 20.0
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """The denominator of the surrogate's ratio: the sampler's numbers, or the trainer's before the first update."""
    mismatch_correction: MismatchCorrection = "none"
    """With recomputed old logprobs: the weight for proximal against sampler."""
    off_policy_threshold: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    distill: DistillForm = "none"
    distill_coef: float = 1.0
    distill_temperature: float = 1.0

    @property
    def weighs_sampler(self) -> bool:
        """Whether every token is weighed by a bounded ratio to the sampler anyway."""
        return self.importance_sampling != "clip" or self.mismatch_correction != "none"


OwnLoss: TypeAlias = Callable[[LossInputs, LossSettings], Tensor]
"""A user's loss: `[N]` values with gradient, one a trained token; denominators are the trainer's."""


def token_losses(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """`[N]` loss of each trained token: the sum of its `loss_terms`."""
    return torch.stack(list(loss_terms(inputs, settings).values())).sum(0)


def loss_terms(inputs: LossInputs, settings: LossSettings) -> dict[str, Tensor]:
    """`[N]` losses by term: `policy` always; `kl`, `entropy` and `distill` where they have a coefficient."""
    terms = {"policy": policy_losses(inputs, settings)}
    if settings.kl_coef and inputs.reference_logprobs is not None:
        divergence = kl_estimates(
            inputs.logprobs, inputs.reference_logprobs, settings.kl_estimator, settings.log_ratio_clamp
        )
        terms["kl"] = settings.kl_coef * divergence
    if settings.entropy_coef:
        terms["entropy"] = -settings.entropy_coef * inputs.entropies.float()
    if settings.distill == "forward_kl" and inputs.teacher_logprobs is not None:
        assert inputs.student_logprobs is not None, "the student's logprobs of the teacher's tokens are missing"
        found = forward_kl(inputs.student_logprobs, inputs.teacher_logprobs, settings.distill_temperature)
        terms["distill"] = settings.distill_coef * found
    return terms


def policy_losses(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """`[N]` surrogate of the loss type, under the weights for the sampler's mismatch and the off-policy mask."""
    surrogate = settings.own_loss or _surrogate
    losses = surrogate(inputs, settings)
    if inputs.truncated_sampling is not None and not settings.weighs_sampler:
        losses = torch.where(inputs.truncated_sampling, _weighed_by_sampler(inputs, settings), losses)
    if settings.mismatch_correction != "none":
        losses = losses * mismatch_of(inputs, settings)
    if settings.off_policy_threshold is not None:
        keep = off_policy_mask(
            inputs.logprobs,
            inputs.rollout_logprobs,
            inputs.advantages,
            inputs.sequences,
            settings.off_policy_threshold,
        )
        losses = losses * keep
    return losses


def surrogate_log_ratios(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """`[N]` log-ratio that the surrogate clips or weighs by: of the token, or for GSPO of its sequence."""
    logs = log_ratios(inputs.logprobs, old_logprobs(inputs, settings), settings.log_ratio_clamp)
    return sequence_means(logs, inputs.sequences) if settings.loss_type == "gspo" else logs


def old_logprobs(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The denominator of the surrogate's ratio."""
    if settings.old_logprobs == "rollout":
        return inputs.rollout_logprobs
    return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs


def mismatch_of(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """`[N]` weights of the trainer's own old logprobs against the sampler's."""
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
    ratios = surrogate_log_ratios(inputs, settings).exp()
    if settings.importance_sampling != "clip":
        bound = truncated_weights if settings.importance_sampling == "truncated" else masked_weights
        return weighted_losses(inputs.logprobs, bound(ratios, settings.tis_floor, settings.tis_cap), inputs.advantages)
    if settings.loss_type == "cispo":
        return cispo_losses(inputs.logprobs, ratios, inputs.advantages, settings.cispo_cap)
    if settings.loss_type in CLIPPED_LOSSES:
        return clipped_losses(ratios, inputs.advantages, settings)
    return naive_losses(inputs.logprobs, inputs.advantages)


def _weighed_by_sampler(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The loss where the ratio to the sampler is off by what its sampling left out: weighed, never clipped."""
    ratios = log_ratios(inputs.logprobs, inputs.rollout_logprobs, settings.log_ratio_clamp).exp()
    return weighted_losses(
        inputs.logprobs, truncated_weights(ratios, settings.tis_floor, settings.tis_cap), inputs.advantages
    )


def clipped_losses(ratios: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """PPO's pessimistic minimum for both signs of the advantage, bounded below for negative ones (dual clip).

    A > 0: no gradient once the ratio is above 1 + high. A < 0: none once it is below 1 - low, and none above
    `dual_clip`, where a single stale token could otherwise dominate the step (Schulman et al. 2017; Ye et al. 2020).
    """
    bounded = ratios.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)
    objective = torch.minimum(ratios * advantages, bounded * advantages)
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return -objective


def weighted_losses(logprobs: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """Importance-weighted policy gradient: -w * A * grad log pi, whatever the ratio does to the value.

    The value equals the clipped loss at ratio 1.
    """
    return -(weights * advantages) * (logprobs - logprobs.detach() + 1.0)


def cispo_losses(logprobs: Tensor, ratios: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """CISPO: the weight is cut, not the token (MiniMax-M1, 2025): -min(r, cap) * A * log pi, the weight held fixed."""
    return -ratios.detach().clamp(max=cap) * advantages * logprobs


def naive_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE: -A * log pi, without correction for the age of the rollout."""
    return -advantages * logprobs


def is_clipped(ratios: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """Which tokens the correction bounded: no gradient under clip, a cut weight under truncation, none under a mask."""
    if settings.importance_sampling != "clip":
        below = ratios < settings.tis_floor
        return below | (ratios > settings.tis_cap)
    if settings.loss_type == "cispo":
        return ratios > settings.cispo_cap
    if settings.loss_type not in CLIPPED_LOSSES:
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
    """Policy version the token was sampled under; -1 where the group does not say."""
    version_bounds: Tensor
    """The same, with the version at arrival at the broker for unknown ones: a bound of the token's age."""
    reference_logprobs: Tensor | None = None
    """Of the reference policy; NaN where nobody has said them yet, None where none is needed or known."""
    proximal_logprobs: Tensor | None = None
    """Under the weights the batch began with, once the learner has scored them."""
    truncated_sampling: Tensor | None = None
    """Boolean, where a group was sampled with top-p or the like; None where none was."""
    teacher_ids: Tensor | None = None
    """[N, K] tokens that a teacher names; None where no sequence has one."""
    teacher_logprobs: Tensor | None = None
    """[N, K], -inf where there are fewer than K."""

    def to(self, device: torch.device) -> Targets:
        tensors = {name: getattr(self, name) for name in self.__slots__}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return Targets(**moved)

    def __len__(self) -> int:
        return len(self.labels)
