"""Values of tokens for people to look at: they are those that the loss is computed from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from atropos_api.wire import Batch, Group
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings, prepare_batch
from example_trainer.objective.objective import Objective, loss_settings
from example_trainer.step.metrics import describe
from example_trainer.step.token_values import record_batch
from example_trainer.step.train_step import StepTraining
from example_trainer.training import BatchTraining, Gradients


def test_a_recorded_advantage_has_the_teachers_credit_that_its_token_is_trained_with() -> None:
    """With equal rewards the page showed 0 at every token, and the step moved them all."""
    group = Group(
        tokens=[[5, 6, 7], [5, 6, 8]],
        masks=[[-100, 6, 7], [-100, 6, 8]],
        scores=[1.0, 1.0],
        inference_logprobs=[[1.0, -0.5, -0.25], [1.0, -0.5, -2.0]],
        distill_token_ids=[[[5], [6], [7]], [[5], [6], [8]]],
        distill_logprobs=[[[-1.0], [-1.0], [-1.0]], [[-1.0], [-1.0], [-1.0]]],
    )
    raw = Batch(number=1, run_id="r", groups=[group])
    config = TrainingConfig(model_name="m", distill="reverse_kl")
    batch = prepare_batch(raw, data_settings(config))
    targets = Objective(loss_settings(config)).prepare(batch.rows, batch.targets, lambda *_: batch.targets.advantages)
    gradients = Gradients(targets.rollout_logprobs, targets.rollout_logprobs)
    trained = BatchTraining(
        batch=batch,
        targets=targets,
        mini_batches=[batch.rows],
        in_an_epoch=1,
        should_stop=lambda: False,
        done=[gradients],
    )
    texts = SimpleNamespace(of=lambda _: {})
    recorded = record_batch(StepTraining(describe(raw, batch), trained, torch.empty(0)), texts, most_tokens=9)
    assert recorded is not None
    (values,) = recorded.values
    assert [one.advantages for one in values.samples if one is not None] == [[-0.5, -0.75], [-0.5, 1.0]]
