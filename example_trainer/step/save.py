"""Writing of a checkpoint by all ranks together: each gives its part, and rank 0 writes the files.

`step.post_step` and `sft.fine_tuning` call it when a checkpoint is due.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from example_trainer.checkpointing import link_as_course, save_checkpoint
from example_trainer.state import ObjectiveState, RandomState, Stateful, TrainerState

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.training import Learner

logger = logging.getLogger(__name__)


def save_from_all_ranks(
    config: TrainingConfig, learner: Learner, state: TrainerState, random: RandomState, objective: ObjectiveState
) -> None:
    """Write the checkpoint of `state` and the learner's present weights; every rank calls this."""
    optimizer, objective = _whole_state(learner, objective)
    if learner.ranks.world_size > 1:
        random = random | {"ranks": learner.ranks.gather(random)}
    with learner.policy.gathered():
        learner.ranks.on_main(partial(_write, config, learner, state, optimizer, random, objective))


def _write(
    config: TrainingConfig,
    learner: Learner,
    state: TrainerState,
    optimizer: Stateful,
    random: RandomState,
    objective: ObjectiveState,
) -> None:
    path = save_checkpoint(
        config.checkpoint_root,
        state,
        learner.policy,
        optimizer,
        random,
        objective=objective,
        keep_last=config.keep_last,
    )
    logger.info("wrote %s", path)
    if config.checkpoint_names == "cs336":
        last = state.step == config.training_steps
        link_as_course(config.checkpoint_root, final=path.name if last else None)


def _whole_state(learner: Learner, objective: ObjectiveState) -> tuple[Stateful, ObjectiveState]:
    """Return optimizer and objective state for a checkpoint, gathered from all ranks if the policy is sharded."""
    if not learner.policy.is_sharded:
        return learner.optimizer, objective
    from example_trainer.modeling.shards import WholeState, whole

    return WholeState(learner.optimizer), whole(objective, keep=learner.ranks.is_main)
