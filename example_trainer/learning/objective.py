"""The objective of a run, as the learner asks for it: what is scored before a batch, losses, what a batch showed.

The pure functions are in `example_trainer.objective`; here they get the options, the reference policy and the state
that lasts from batch to batch (the coefficient of the divergence, a reference that was swapped in).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from example_trainer.checkpointing import ObjectiveState
from example_trainer.learning.reference import Reference, Score
from example_trainer.objective.distillation import teacher_credits
from example_trainer.objective.kl import KlController
from example_trainer.objective.losses import LossInputs, LossSettings, loss_terms
from example_trainer.objective.metrics import policy_metrics
from example_trainer.objective.own_loss import load_own_loss
from example_trainer.objective.packing import Row

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.data import Targets
    from example_trainer.model import Policy


def loss_settings(config: TrainingConfig) -> LossSettings:
    """The options of the loss; imports a loss of the user's own."""
    return LossSettings(
        loss_type=config.loss_type,
        own_loss=load_own_loss(config.loss_type) if config.has_own_loss else None,
        importance_sampling=config.importance_sampling,
        clip_eps_low=config.clip_eps,
        clip_eps_high=config.clip_eps_high or config.clip_eps,
        dual_clip=config.dual_clip,
        cispo_cap=config.cispo_cap,
        tis_cap=config.tis_cap,
        tis_floor=config.tis_floor,
        log_ratio_clamp=config.log_ratio_clamp,
        old_logprobs=config.old_logprobs,
        mismatch_correction=config.mismatch_correction,
        off_policy_threshold=config.off_policy_mask,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        distill=config.distill,
        distill_coef=config.distill_coef,
        distill_temperature=config.distill_temperature,
    )


class Objective:
    """What a batch is trained towards."""

    def __init__(
        self,
        settings: LossSettings,
        *,
        reference: Reference | None = None,
        kl: KlController | None = None,
        several_updates: bool = False,
    ) -> None:
        self.settings = settings
        self.reference = reference
        self.kl = kl or KlController(settings.kl_coef)
        self._scores_proximal = settings.old_logprobs == "recomputed" and several_updates

    def prepare(self, rows: Sequence[Row], targets: Targets, score: Score) -> Targets:
        """`targets` with all that has to be known before the batch's first update: one forward each at most."""
        self.settings = replace(self.settings, kl_coef=self.kl.coefficient)
        if self.reference is not None:
            targets = replace(targets, reference_logprobs=self.reference.logprobs(rows, targets, score))
        if self._scores_proximal:
            targets = replace(targets, proximal_logprobs=score(rows, targets))
        if self.settings.distill == "reverse_kl" and targets.teacher_ids is not None:
            assert targets.teacher_logprobs is not None
            credit = teacher_credits(
                targets.teacher_ids, targets.teacher_logprobs, targets.labels, targets.rollout_logprobs
            )
            targets = replace(targets, advantages=targets.advantages + self.settings.distill_coef * credit)
        return targets

    def labels(self, targets: Targets, at: Tensor) -> Tensor:
        """The tokens whose logprobs the loss needs at `at`: `[n]`, or `[n, 1 + K]` with the teacher's behind."""
        own = targets.labels[at]
        if self.settings.distill != "forward_kl" or targets.teacher_ids is None:
            return own
        return torch.cat([own[:, None], targets.teacher_ids[at]], dim=1)

    def terms(self, targets: Targets, at: Tensor, logprobs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
        """`[n]` losses by term of the tokens `at`, from their logprobs (of `labels`) and entropies."""
        student = None if logprobs.ndim == 1 else logprobs[:, 1:]
        inputs = LossInputs(
            logprobs=logprobs if student is None else logprobs[:, 0],
            entropies=entropies,
            rollout_logprobs=targets.rollout_logprobs[at],
            advantages=targets.advantages[at],
            sequences=targets.sequences[at],
            proximal_logprobs=_at(targets.proximal_logprobs, at),
            reference_logprobs=_at(targets.reference_logprobs, at),
            truncated_sampling=_at(targets.truncated_sampling, at),
            teacher_logprobs=None if student is None else _at(targets.teacher_logprobs, at),
            student_logprobs=student,
        )
        return loss_terms(inputs, self.settings)

    def metrics(self, targets: Targets, logprobs: Tensor, entropies: Tensor) -> dict[str, float]:
        """What the batch showed, from `[N]` arrays over all its trained tokens."""
        found = policy_metrics(
            LossInputs(
                logprobs=logprobs,
                entropies=entropies,
                rollout_logprobs=targets.rollout_logprobs,
                advantages=targets.advantages,
                sequences=targets.sequences,
                proximal_logprobs=targets.proximal_logprobs,
                reference_logprobs=targets.reference_logprobs if self.reference is not None else None,
            ),
            self.settings,
        )
        if self.reference is not None:
            found[names.TRAIN_KL_COEF] = self.settings.kl_coef
        return found

    def after_batch(self, number: int, metrics: dict[str, float]) -> None:
        """Let what lasts from batch to batch follow: the divergence's coefficient, and the reference."""
        if names.TRAIN_KL_REFERENCE in metrics:
            self.kl.observe(metrics[names.TRAIN_KL_REFERENCE])
        if self.reference is not None:
            self.reference.after_step(number)

    def state(self) -> ObjectiveState:
        """What a checkpoint has to remember, as `torch.save` takes it."""
        reference = self.reference
        swapped = reference.weights if reference is not None and reference.swapped else None
        return {"kl_coef": self.kl.coefficient, "reference": swapped}

    def load_state(self, state: ObjectiveState) -> None:
        """Go on from `state`; a run that was resumed with another --kl-coef keeps the one it was given."""
        if self.kl.target is not None and state["kl_coef"]:
            self.kl.coefficient = state["kl_coef"]
        if self.reference is not None and state["reference"] is not None:
            self.reference.restore(state["reference"])


def make_objective(config: TrainingConfig, policy: Policy) -> Objective:
    """The objective that `config` asks for; the policy as it is now becomes the reference where one is needed."""
    settings = loss_settings(config)
    reference = None
    if config.kl_coef:
        reference = Reference(policy, model_name=config.ref_model, update_interval=config.ref_update_interval)
    kl = KlController(config.kl_coef, target=config.target_kl, rate=config.kl_adapt_rate)
    return Objective(settings, reference=reference, kl=kl, several_updates=config.optimizer_steps_per_batch > 1)


def _at(values: Tensor | None, at: Tensor) -> Tensor | None:
    return None if values is None else values[at]
