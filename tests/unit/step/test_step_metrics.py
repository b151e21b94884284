"""Metrics of a batch before it is trained: lengths, repetition and environments."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atropos_api.common import metric_names as names
from atropos_api.wire import Batch, Group
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings, prepare_batch
from example_trainer.group_sequences import leave_out_absent
from example_trainer.state import Progress, TrainerState
from example_trainer.step import train_step
from example_trainer.step.metrics import ages_of, describe, repetition
from example_trainer.step.train_step import TrainStep


def group(answers: list[list[int]], scores: list[float], env_id: int | None) -> Group:
    prompt = [7, 8]
    return Group(
        tokens=[prompt + answer for answer in answers],
        masks=[[-100, -100, *answer] for answer in answers],
        scores=scores,
        inference_logprobs=[[1.0, 1.0, *[-0.5] * len(answer)] for answer in answers],
        env_id=env_id,
    )


def facts(*groups: Group, **settings: object) -> dict[str, float]:
    batch = Batch(number=1, run_id="r", groups=list(groups))
    config = TrainingConfig.model_validate({"model_name": "m", **settings})
    return describe(batch, prepare_batch(batch, data_settings(config))).metrics


def test_lengths_count_what_was_sampled_and_what_is_trained() -> None:
    found = facts(group([[1], [1, 2, 3]], [0.0, 1.0], 0), group([[1] * 5, [2] * 7], [1.0, 1.0], 0))
    assert (found[names.RESPONSE_LENGTH_MIN], found[names.RESPONSE_LENGTH_MAX]) == (1, 7)
    assert found[names.RESPONSE_LENGTH_STD] == pytest.approx(float(np.std([1, 3, 5, 7])))
    assert found[names.TRAINED_LENGTH_MEAN] == 2.0
    assert found[names.TRAINED_TOKENS] == 4.0
    assert found[names.TRAINED_FRACTION] == 4 / 16
    assert found[names.NO_SIGNAL_FRACTION] == 0.5


def test_advantages_of_all_sequences_are_measured_and_groups_without_any_are_counted() -> None:
    mixed, equal = group([[1], [2], [3]], [0.0, 0.0, 3.0], 0), group([[1], [2]], [1.0, 1.0], 0)
    found = facts(mixed, equal, advantage_norm="none")
    assert found[names.ADVANTAGE_MEAN] == pytest.approx(0.0)
    assert (found[names.ADVANTAGE_MIN], found[names.ADVANTAGE_MAX]) == (-1.0, 2.0)
    assert found[names.ADVANTAGE_STD] == pytest.approx(float(np.std([-1.0, -1.0, 2.0, 0.0, 0.0])))
    assert found[names.ADVANTAGE_ZERO_GROUPS] == 0.5
    normed = facts(mixed, equal)
    assert normed[names.ADVANTAGE_MAX] == pytest.approx(2.0 / (3**0.5 + 1e-4))


def test_advantages_that_the_environment_gives_or_takes_away_are_measured_as_they_are_trained() -> None:
    own = group([[1, 2], [3, 4]], [0.0, 0.0], 0)
    own.advantages = [[0.0, 0.0, 1.0, 2.0], [0.0, 0.0, -1.0, -2.0]]
    own.overrides = [None, {"set_advantage_to_zero": True}]
    found = facts(own)
    assert (found[names.ADVANTAGE_MIN], found[names.ADVANTAGE_MAX]) == (0.0, 1.5)
    assert found[names.ADVANTAGE_ZERO_GROUPS] == 0.0


def test_what_length_takes_from_the_rewards_is_logged_beside_them() -> None:
    limits = {"max_response_tokens": 3, "overlong_penalty": 2.0}
    assert facts(group([[1], [1, 2, 3]], [0.0, 1.0], 0), **limits)[names.REWARD_OVERLONG_PENALTY] == -1.0


def test_each_environment_is_counted_by_itself() -> None:
    found = facts(
        group([[1], [1, 2]], [0.0, 1.0], 3), group([[1], [2]], [2.0, 4.0], 5), group([[9], [9]], [0.0, 1.0], None)
    )
    assert found["env/3/sequences"] == found["env/unknown/sequences"] == 2.0
    assert (found["env/3/reward_mean"], found["env/5/reward_mean"]) == (0.5, 3.0)
    assert (found["env/3/length_mean"], found["env/5/reward_std"]) == (1.5, 1.0)


def test_a_batch_whose_members_are_all_absent_has_metrics_and_trains_nothing() -> None:
    closed = group([[1], [2]], [0.0, 1.0], 0)
    closed.overrides = [{"absent": True}] * 2
    batch, absent = leave_out_absent(Batch(number=1, run_id="r", groups=[closed]))
    config = TrainingConfig(model_name="m")
    prepared = describe(batch, prepare_batch(batch, data_settings(config), absent=absent))
    assert prepared.training.rows == []
    assert prepared.metrics[names.LEFT_OUT.format(cause="absent")] == 2.0
    assert all(map(math.isfinite, prepared.metrics.values()))


def test_repetition_is_the_share_of_fourgrams_seen_before_in_the_same_answer() -> None:
    varied, looping = np.arange(20), np.tile([1, 2], 10)
    assert repetition([varied, varied]) == 0.0
    assert repetition([looping]) == pytest.approx(15 / 17)
    assert repetition([np.arange(3)]) == 0.0


def test_steps_that_change_no_weights_make_no_token_older() -> None:
    """After three steps without a signal, --staleness-mask 2 masked all that the unchanged weights had sampled."""
    sampled = group([[1], [2]], [0.0, 1.0], 0)
    sampled.policy_versions = [[(2, 3, 5)], [(2, 3, 4)]]
    batch = prepare_batch(Batch(number=7, run_id="r", groups=[sampled]), data_settings(TrainingConfig(model_name="m")))
    assert ages_of(batch, Progress(step=6, weights_step=3, steps_by_version={4: 2, 5: 3})).tolist() == [0, 1]


@pytest.mark.parametrize(("weights_step", "counted_from"), [(3, 3), (None, 6)])
def test_a_resume_counts_ages_from_the_step_that_changed_the_weights_last(
    monkeypatch: pytest.MonkeyPatch, weights_step: int | None, counted_from: int
) -> None:
    """They were counted from the checkpoint's step, so that a resumed run masked what an uninterrupted one trained."""
    for name in ("refuse_other_base", "restore"):
        monkeypatch.setattr(train_step, name, lambda *_, **__: None)
    learner = SimpleNamespace(policy=None, optimizer=None, ranks=SimpleNamespace(rank=0), loss_scale=None, updates=0)
    resumed = TrainStep(config=None, progress=Progress(), learner=learner, alignment=None)
    known = {"policy_version": 5, "highest_version": 5, "run_id": "r", "run_name": "n", "seed": 0}
    resumed.resume(Path(), TrainerState(step=6, updates=3, weights_step=weights_step, **known))
    assert (resumed.progress.step, resumed.progress.weights_step) == (6, counted_from)
