"""The objective of a run: it joins the package's pure functions with the options, a reference policy and saved state.

The options are read in `options.objective`; `loss_settings` fills in those that were left unset. The state kept between
batches is the KL coefficient and a swapped-in reference.

A user-defined loss is named by its import path:

    # my_pkg/my_module.py
    def my_loss(inputs: LossInputs, settings: LossSettings) -> Tensor:
        ratios = (inputs.logprobs - inputs.rollout_logprobs).exp()
        return -ratios * inputs.advantages

`--loss-type my_pkg.my_module:my_loss` uses it instead of the surrogate. It returns `[N]` fp32 values with gradient, one
per trained token; the trainer adds averaging, KL and entropy terms, and masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from atropos_api.common import metric_names as names
from atropos_api.common.import_path import import_own
from example_trainer.errors import UnusableLoss
from example_trainer.modeling.micro_batches import Row
from example_trainer.objective.kl_divergence import KlController, teacher_credits
from example_trainer.objective.losses import (
    FusedClip,
    LossInputs,
    LossSettings,
    OwnLoss,
    clipped_losses,
    loss_terms,
)
from example_trainer.objective.metrics import policy_metrics
from example_trainer.objective.ratios import log_ratios, sequence_means
from example_trainer.objective.reference_policy import Reference, Score
from example_trainer.objective.sampling_masks import labels_with_masks, over_masks
from example_trainer.objective.surrogates import outward_squares, second_moment_cut
from example_trainer.options.objective import CLIPPED_LOSSES, WHOLE_SEQUENCE_LOSSES
from example_trainer.state import ObjectiveState

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy
    from example_trainer.objective.losses import Targets
    from example_trainer.options.objective import ObjectiveOptions
    from example_trainer.options.training_options import TrainingOptions


logger = logging.getLogger(__name__)


Gather: TypeAlias = Callable[[Tensor], list[Tensor]]
"""A function that returns the tensors of all ranks, of which each gives one."""


def list_of_one(own: Tensor) -> list[Tensor]:
    """Gather for a run of one rank."""
    return [own]


def load_own_loss(name: str) -> OwnLoss:
    """Import `package.module:function` and try it on three tokens; raise `UnusableLoss` if either fails.

    The working directory is searched too.
    """
    module_name, _, function_name = name.partition(":")
    try:
        loss: OwnLoss = getattr(import_own(module_name), function_name)
    except Exception as error:  # a user's module may raise anything while it is loaded
        raised = f"{type(error).__name__}: {error}"
        raise UnusableLoss(
            f"--loss-type {name} cannot be imported: {raised}; check the path, and PYTHONPATH"
        ) from error
    _try(name, loss)
    return loss


def _try(name: str, loss: OwnLoss) -> None:
    logprobs, other = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([-1.1, -1.9, -0.5])
    inputs = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones(3, requires_grad=True),
        rollout_logprobs=other,
        proximal_logprobs=other,
        reference_logprobs=other,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        sequences=torch.tensor([0, 0, 1]),
    )
    try:
        values = loss(inputs, LossSettings(loss_type=name))
    except Exception as error:
        raise UnusableLoss(
            f"--loss-type {name} fails on three tokens: {error!r}; give it the signature of the example in "
            "docs/explanation/the-objective.md"
        ) from error
    if not isinstance(values, torch.Tensor) or values.shape != logprobs.shape or not values.requires_grad:
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UnusableLoss(
            f"--loss-type {name} returned {found} for 3 tokens; it must return a tensor of 3 losses with gradient"
        )


def loss_settings(config: ObjectiveOptions) -> LossSettings:
    """Return the loss settings of `config`; import a user-defined loss."""
    same_names = {field.name for field in fields(LossSettings)}
    own: dict[str, Any] = {
        "own_loss": load_own_loss(config.loss_type) if config.has_own_loss else None,
        "clip_eps_low": config.clip_eps,
        "clip_eps_high": config.clip_eps_high or config.clip_eps,
        "off_policy_threshold": config.off_policy_mask,
    }
    return LossSettings(**config.model_dump(include=same_names) | own)


class Objective:
    """The objective of a run as the learner uses it: preparation of a batch, loss terms, metrics and saved state."""

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
        self._warned = False
        self._scores_proximal = settings.old_logprobs == "recomputed" and several_updates

    def prepare(self, rows: Sequence[Row], targets: Targets, score: Score, gather: Gather = list_of_one) -> Targets:
        """Return `targets` with the arrays needed before the batch's first update; each costs at most one forward.

        `gather` returns the arrays that all ranks give it.
        """
        self.settings = replace(self.settings, kl_coef=self.kl.coefficient)
        if targets.truncated_sampling is not None and self.settings.loss_type in WHOLE_SEQUENCE_LOSSES:
            # A token without its mask has a wrong ratio, and would move the ratio of its whole sequence.
            share = sequence_means(targets.truncated_sampling.float(), targets.sequences)
            targets = replace(targets, truncated_sampling=share > 0)
        if self.reference is not None:
            targets = replace(targets, reference_logprobs=self.reference.logprobs(rows, targets, score))
        self._warn_without_teacher(targets)
        if self._scores_proximal:
            targets = replace(targets, proximal_logprobs=score(rows, targets))
        if self.settings.distill == "reverse_kl" and targets.teacher_ids is not None:
            assert targets.teacher_logprobs is not None
            credit = teacher_credits(
                targets.teacher_ids,
                targets.teacher_logprobs,
                targets.labels,
                targets.rollout_logprobs,
                self._teacher_temperatures(targets.temperatures),
            )
            targets = replace(targets, advantages=targets.advantages + self.settings.distill_coef * credit)
        if self.settings.loss_type == "m2po":
            targets = replace(targets, trusted=self._trusted(rows, targets, score, gather))
        return targets

    def fuse_clip(self, device: torch.device) -> None:
        """Compile ratio, clip and minimum of the clipped losses into one kernel, if it proves equal on `device`.

        Plain operations read and write `[n]` arrays once each, forward and backward.
        """
        settings = self.settings
        if settings.loss_type not in CLIPPED_LOSSES or settings.importance_sampling != "clip" or settings.own_loss:
            return

        def clipped(logs: Tensor, advantages: Tensor) -> Tensor:
            return clipped_losses(logs.exp(), advantages, settings)

        fused = torch.compile(clipped, dynamic=True)
        try:
            is_equal = torch.allclose(_clip_of_a_grid(fused, device), _clip_of_a_grid(clipped, device), atol=1e-6)
        except RuntimeError as error:
            logger.warning("the clip of ratios is not compiled: %s", (str(error).splitlines() or [repr(error)])[0])
            return
        if is_equal:
            self.settings = replace(settings, fused_clip=fused)
        else:
            logger.warning("the clip of ratios is not compiled: it differs from plain operations on this device")

    def _teacher_temperatures(self, sampled_at: Tensor) -> Tensor:
        """Return `[N]` temperatures of the teacher's probabilities: those of the rollouts, unless one is set."""
        fixed = self.settings.distill_temperature
        return sampled_at if fixed is None else torch.full_like(sampled_at, fixed)

    def _trusted(self, rows: Sequence[Row], targets: Targets, score: Score, gather: Gather) -> Tensor:
        """Return a mask of the tokens that stay, by the second moment over the batch's tokens of all ranks."""
        known = targets.proximal_logprobs
        logprobs = score(rows, targets) if known is None else known
        logs = log_ratios(logprobs, targets.rollout_logprobs, self.settings.log_ratio_clamp)
        squares, outward = outward_squares(logs, targets.advantages)
        if targets.truncated_sampling is not None:
            outward = outward & ~targets.truncated_sampling
        everywhere = torch.cat(gather(squares[outward].cpu()))
        return ~outward | (squares < second_moment_cut(everywhere, self.settings.m2_threshold))

    def _warn_without_teacher(self, targets: Targets) -> None:
        """Warn once if nothing of a batch is learnt from a teacher."""
        if self._warned or self.settings.distill == "none":
            return
        logprobs = targets.teacher_logprobs
        if logprobs is None:
            self._warned = True
            logger.warning(
                "--distill %s: a batch has no distill_token_ids, so nothing is learnt from a teacher; use an "
                "environment with a teacher (distill_server.py), and see its log for what failed",
                self.settings.distill,
            )
        elif self.settings.distill == "forward_kl" and not bool((logprobs.isfinite().sum(-1) > 1).any()):
            self._warned = True
            logger.warning(
                "--distill forward_kl: the teacher names one token at each position, which is no distribution to "
                "learn; add --env.teacher_top_k 8, or use --distill reverse_kl"
            )

    def labels(self, targets: Targets, at: Tensor) -> Tensor:
        """Return the tokens whose logprobs the loss needs at `at`: `[n]`, or several each with the teacher's last."""
        own = labels_with_masks(targets, at)
        teacher_ids = self._compared_teacher(targets)
        if teacher_ids is None:
            return own
        return torch.cat([own if own.ndim == 2 else own[:, None], teacher_ids[at]], dim=1)

    def split(self, targets: Targets, at: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logprobs of `labels` as those of the sampled tokens, `[n]`, and of the teacher's, `[n, K]`."""
        teacher_ids = self._compared_teacher(targets)
        if teacher_ids is None:
            return over_masks(logprobs, targets, at), None
        count = teacher_ids.shape[1]
        own = logprobs[:, 0] if logprobs.shape[1] == 1 + count else logprobs[:, :-count]
        return over_masks(own, targets, at), logprobs[:, -count:]

    def _compared_teacher(self, targets: Targets) -> Tensor | None:
        """Return the `[N, K]` tokens at which the loss compares the policy with a teacher; None if it does not."""
        return targets.teacher_ids if self.settings.distill == "forward_kl" else None

    def terms(
        self, targets: Targets, at: Tensor, logprobs: Tensor, student: Tensor | None, entropies: Tensor
    ) -> dict[str, Tensor]:
        """Return `[n]` losses by term for the tokens `at`, from the logprobs of `split` and the entropies."""
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            rollout_logprobs=targets.rollout_logprobs[at],
            advantages=targets.advantages[at],
            sequences=targets.sequences[at],
            proximal_logprobs=_at(targets.proximal_logprobs, at),
            reference_logprobs=_at(targets.reference_logprobs, at),
            truncated_sampling=_at(targets.truncated_sampling, at),
            trusted=_at(targets.trusted, at),
            ages=_at(targets.ages, at),
            teacher_logprobs=None if student is None else _at(targets.teacher_logprobs, at),
            student_logprobs=student,
            teacher_temperatures=None if student is None else self._teacher_temperatures(targets.temperatures[at]),
        )
        return loss_terms(inputs, self.settings)

    def metrics(self, targets: Targets, logprobs: Tensor, entropies: Tensor) -> dict[str, float]:
        """Return the metrics of a batch, from `[N]` arrays over all its trained tokens."""
        found = policy_metrics(
            LossInputs(
                logprobs=logprobs,
                entropies=entropies,
                rollout_logprobs=targets.rollout_logprobs,
                advantages=targets.advantages,
                sequences=targets.sequences,
                proximal_logprobs=targets.proximal_logprobs,
                truncated_sampling=targets.truncated_sampling,
                ages=targets.ages,
                trusted=targets.trusted,
                reference_logprobs=targets.reference_logprobs if self.reference is not None else None,
            ),
            self.settings,
        )
        if self.reference is not None:
            found[names.TRAIN_KL_COEF] = self.settings.kl_coef
        return found

    def after_batch(self, number: int, metrics: dict[str, float]) -> None:
        """Update the state kept between batches: the KL coefficient, and the reference if its interval is over."""
        if names.TRAIN_KL_REFERENCE in metrics:
            self.kl.observe(metrics[names.TRAIN_KL_REFERENCE])
        if self.reference is not None:
            self.reference.after_step(number)

    def state(self) -> ObjectiveState:
        """Return the state that a checkpoint must hold, in a form that `torch.save` accepts."""
        reference = self.reference
        swapped = reference.weights if reference is not None and reference.swapped else None
        return {"kl_coef": self.kl.coefficient, "reference": swapped}

    def load_state(self, state: ObjectiveState) -> None:
        """Restore `state`; the KL coefficient only if it adapts to a target, else the given --kl-coef holds."""
        if self.kl.target is not None and state["kl_coef"]:
            self.kl.coefficient = state["kl_coef"]
        if self.reference is not None and state["reference"] is not None:
            self.reference.restore(state["reference"])


def make_objective(config: TrainingOptions, policy: Policy) -> Objective:
    """Return the objective for `config`; if it needs a reference and names none, the current policy becomes it."""
    settings = loss_settings(config)
    reference = None
    if config.kl_coef:
        reference = Reference(policy, model_name=config.ref_model, update_interval=config.ref_update_interval)
    kl = KlController(config.kl_coef, target=config.target_kl, rate=config.kl_adapt_rate)
    return Objective(settings, reference=reference, kl=kl, several_updates=config.optimizer_steps_per_batch > 1)


def _clip_of_a_grid(clip: FusedClip, device: torch.device) -> Tensor:
    """Return `[2, n]` losses and gradients of log-ratios within and beyond all bounds, for advantages of both signs."""
    logs = torch.linspace(-3.0, 3.0, 61, device=device).repeat(2).requires_grad_()
    advantages = torch.tensor([1.0, -0.5], device=device).repeat_interleave(61)
    losses = clip(logs, advantages)
    return torch.stack([losses.detach(), *torch.autograd.grad(losses.sum(), logs)])


def _at(values: Tensor | None, at: Tensor) -> Tensor | None:
    return None if values is None else values[at]
