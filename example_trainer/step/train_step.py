"""The train step: the part of a step that a live run and a replay share, from a batch to its metrics.

Nothing here publishes, announces or writes, or waits for another process of the run except the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_api.wire import Batch
from example_trainer.checkpointing import restore
from example_trainer.data import data_settings, prepare_batch
from example_trainer.distributed.ranks import Ranks
from example_trainer.group_sequences import find_places, leave_out_absent
from example_trainer.modeling.base_fingerprint import base_fingerprint
from example_trainer.modeling.kernels import install_kernels
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.objective.objective import make_objective
from example_trainer.resume_settings import refuse_other_base
from example_trainer.state import Progress, TrainerState
from example_trainer.step import metrics as step_metrics
from example_trainer.step.logprob_mismatch import Alignment
from example_trainer.step.metrics import PreparedBatch, describe
from example_trainer.training import BatchTraining, Learner

if TYPE_CHECKING:
    from torch import Tensor

    from example_trainer.config import TrainingConfig
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepTraining:
    """One batch under training."""

    prepared: PreparedBatch
    batch: BatchTraining
    older_logprobs: Tensor
    """`[M]` logprobs of the tokens that older policy versions sampled, under those versions' weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """The train step of a run: learner, alignment check and the run's progress."""

    config: TrainingConfig
    progress: Progress
    learner: Learner
    alignment: Alignment

    def resume(self, checkpoint: Path, state: TrainerState) -> None:
        """Load weights, optimizer, objective and counts from a checkpoint."""
        learner = self.learner
        refuse_other_base(state, self.config, self.progress.base)
        objective = restore(checkpoint, learner.policy, learner.optimizer, rank=learner.ranks.rank)
        if objective is not None:
            learner.objective.load_state(objective)
        progress = self.progress
        progress.step = progress.committed = progress.checkpointed = state.step
        progress.weights_step = state.step if state.weights_step is None else state.weights_step
        progress.version = max(progress.version, state.highest_version)
        progress.steps_by_version = {int(version): step for version, step in state.steps_by_version.items()}
        progress.metrics, progress.health = dict(state.metrics), state.health
        learner.updates = state.updates
        if learner.loss_scale is not None and state.loss_scale is not None:
            learner.loss_scale.load_state(state.loss_scale)
        logger.info("resumed from %s: step %d", checkpoint, state.step)

    def prepare(self, batch: Batch, whole: Batch | None = None) -> PreparedBatch:
        """Convert a batch into training data and compute its metrics; a pure function of its arguments.

        The metrics are those of `whole`, if given: the full batch of which `batch` is one rank's share.
        """
        vocabulary = self.learner.policy.hf_config.get_text_config().vocab_size
        settings = data_settings(self.config, vocabulary=vocabulary)
        alone = whole is None or whole is batch
        batch, absent = leave_out_absent(batch)
        if whole is None or alone:
            return describe(batch, prepare_batch(batch, settings, absent=absent))
        whole, absent = leave_out_absent(whole)
        share = prepare_batch(batch, settings, whole=whole)
        prepared = describe(whole, prepare_batch(whole, settings, absent=absent))
        return replace(prepared, training=share, groups=batch.groups, places=find_places(batch.groups, whole.groups))

    def begin(self, prepared: PreparedBatch, should_stop: Callable[[], bool] = lambda: False) -> StepTraining:
        """Score the tokens that older policy versions sampled, and make the batch's mini-batches."""
        batch = prepared.training
        older = self.alignment.score_older(batch)
        aged = replace(batch, targets=replace(batch.targets, ages=step_metrics.ages_of(batch, self.progress)))
        return StepTraining(prepared, self.learner.begin(aged, should_stop), older)

    def finish(self, training: StepTraining) -> dict[str, float]:
        """Count the step, and return its metrics without times."""
        batch = training.prepared.training
        result = self.learner.finish(training.batch)
        metrics = training.prepared.metrics | step_metrics.measure(training.prepared.whole, result, self.progress)
        metrics |= self.alignment.measure(result, training.older_logprobs)
        self.progress.step = batch.number
        if result.updates:
            self.progress.weights_step = batch.number
            self.alignment.moved()
        return metrics

    def train(self, prepared: PreparedBatch) -> dict[str, float]:
        """Train the batch, count the step and return its metrics without times."""
        training = self.begin(prepared)
        for mini_batch in training.batch.mini_batches:
            self.learner.apply(self.learner.accumulate(training.batch, mini_batch))
        return self.finish(training)


def make_train_step(config: TrainingConfig, policy: Policy, ranks: Ranks | None = None) -> TrainStep:
    """Return a train step for a policy that has just been loaded."""
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    layout = choose_layout(policy, padded=config.pad_to is not None)
    objective = make_objective(config, policy)
    head_passes = install_kernels(policy, config.kernels, layout)
    if head_passes is not None:
        objective.fuse_clip(policy.device)
    learner = Learner(
        policy,
        optimizer,
        config,
        objective=objective,
        layout=layout,
        ranks=ranks,
        head_passes=head_passes,
    )
    alignment = Alignment(
        learner, keep=config.keep_versions, sample_sequences=config.alignment_sample_sequences, seed=config.seed
    )
    progress = Progress(base=base_fingerprint(config.model_name))
    return TrainStep(config=config, progress=progress, learner=learner, alignment=alignment)
