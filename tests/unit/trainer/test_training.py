"""One training step: invariances, denominators, steps that must not happen, alignment."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_api.wire import Batch
from example_trainer.config import TrainingConfig
from example_trainer.data import TrainingBatch, data_settings, prepare_batch
from example_trainer.errors import TrainingDiverged, UnsupportedModel
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.micro_batches import LayoutKind
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.modeling.policy import Policy
from example_trainer.objective.objective import make_objective
from example_trainer.step.logprob_mismatch import Alignment
from example_trainer.testing import Sampler
from example_trainer.training import (
    Learner,
    StopRequestedError,
)


def make_config(model: Path, **settings: Any) -> TrainingConfig:
    values = {"model_name": str(model), "dtype": "float32", "optimizer": "adamw", "lr": 1e-3, "seq_len": 64}
    return TrainingConfig.model_validate(values | settings)


def make_learner(model: Path, *, layout: LayoutKind | None = None, **settings: Any) -> Learner:
    config = make_config(model, **settings)
    policy = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    chosen = choose_layout(policy)
    objective = make_objective(config, policy)
    return Learner(policy, optimizer, config, objective=objective, layout=layout or chosen)


def make_batch(
    model: Path, *, version: int | None = 1, number: int = 1, groups: int = 6, **settings: Any
) -> TrainingBatch:
    sampler = Sampler(model, seed=number)
    weights = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu")).snapshot()
    made = [sampler.sample(weights, version, lambda a: float(sum(a) % 3), group_size=4) for _ in range(groups)]
    config = make_config(model, **settings)
    return prepare_batch(Batch(number=number, run_id="r", groups=made), data_settings(config))


def of_age(batch: TrainingBatch, age: int) -> TrainingBatch:
    return replace(batch, targets=replace(batch.targets, ages=torch.full_like(batch.targets.versions, age)))


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in learner.policy.masters.items()}


def assert_same_weights(left: Learner, right: Learner, tolerance: float = 1e-6) -> None:
    for name, weight in weights_of(left).items():
        torch.testing.assert_close(weight, weights_of(right)[name], rtol=0, atol=tolerance)


def gradients_after(learner: Learner, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    learner.train(batch)
    return {name: master.grad.clone() for name, master in learner.policy.masters.items() if master.grad is not None}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_p2_the_micro_batch_split_and_the_layout_change_no_gradient(tiny_model: Path, aggregation: str) -> None:
    batch = make_batch(tiny_model)
    settings: dict[str, Any] = {"loss_aggregation": aggregation, "max_grad_norm": 0.0}
    whole = make_learner(tiny_model, **settings, token_budget=10_000, layout="shared")
    expected = gradients_after(whole, batch)
    splits: tuple[tuple[int, LayoutKind], ...] = ((1, "shared"), (30, "packed"), (40, "rows"))
    for budget, layout in splits:
        split = make_learner(tiny_model, **settings, token_budget=budget, layout=layout)
        for name, gradient in gradients_after(split, batch).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


def test_groups_without_signal_leave_the_denominator(tiny_model: Path) -> None:
    learner, other = (make_learner(tiny_model, max_grad_norm=0.0) for _ in range(2))
    batch, weights = make_batch(tiny_model), learner.policy.snapshot()
    flat_sampler = Sampler(tiny_model, seed=9)
    useless = [flat_sampler.sample(weights, 1, lambda _: 1.0, group_size=4) for _ in range(3)]
    config = make_config(tiny_model)
    sampled = Sampler(tiny_model, seed=1)
    useful = [sampled.sample(weights, 1, lambda a: float(sum(a) % 3), group_size=4) for _ in range(6)]
    mixed = prepare_batch(Batch(number=1, run_id="r", groups=useless + useful), data_settings(config))
    expected = gradients_after(learner, batch)
    for name, gradient in gradients_after(other, mixed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-7)


def test_adding_a_constant_to_all_rewards_gives_the_same_weights(tiny_model: Path) -> None:
    plain, shifted = make_learner(tiny_model), make_learner(tiny_model)
    config, weights = make_config(tiny_model), plain.policy.snapshot()
    for learner, offset in ((plain, 0.0), (shifted, 1.0)):
        sampler = Sampler(tiny_model, seed=5)
        groups = [
            sampler.sample(weights, 1, lambda a, by=offset: float(sum(a) % 3) + by, group_size=4) for _ in range(6)
        ]
        learner.train(prepare_batch(Batch(number=1, run_id="r", groups=groups), data_settings(config)))
    # Adam's first step is lr times the gradient's sign, so noise near a zero gradient has its full effect.
    assert_same_weights(plain, shifted, tolerance=1e-4)


@pytest.mark.parametrize("sampling", ["clip", "truncated"])
def test_fresh_rollouts_have_ratio_one_and_nothing_clipped(tiny_model: Path, sampling: str) -> None:
    metrics = make_learner(tiny_model, importance_sampling=sampling).train(make_batch(tiny_model)).metrics
    assert metrics["grpo/mean_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["grpo/clipped_fraction"] == 0.0
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < metrics["train/entropy"] < 3.5


def test_fresh_clip_and_truncated_steps_give_the_same_weights(tiny_model: Path) -> None:
    batch = make_batch(tiny_model)
    clip, truncated = make_learner(tiny_model), make_learner(tiny_model, importance_sampling="truncated")
    clip.train(batch)
    truncated.train(batch)
    assert_same_weights(clip, truncated)


def test_r34_a_batch_without_signal_moves_nothing_and_is_said(tiny_model: Path) -> None:
    learner = make_learner(tiny_model)
    before = weights_of(learner)
    config, sampler = make_config(tiny_model), Sampler(tiny_model)
    flat = [sampler.sample(learner.policy.snapshot(), 1, lambda _: 1.0, group_size=4)]
    result = learner.train(prepare_batch(Batch(number=1, run_id="r", groups=flat), data_settings(config)))
    assert (result.updates, learner.updates, result.metrics["train/skipped"]) == (0, 0, 1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def poisoned(batch: TrainingBatch) -> TrainingBatch:
    advantages = batch.targets.advantages.clone()
    advantages[0] = float("inf")
    return replace(batch, targets=replace(batch.targets, advantages=advantages))


def test_a_step_without_finite_gradient_is_skipped_counted_and_stops_after_a_few(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, max_nonfinite_steps=2)
    before, batch = weights_of(learner), make_batch(tiny_model)
    result = learner.train(poisoned(batch))
    assert (result.updates, result.metrics["train/nonfinite"]) == (0, 1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())
    assert learner.train(batch).updates == 1
    learner.train(poisoned(batch))
    with pytest.raises(TrainingDiverged, match="--lr"):
        learner.train(poisoned(batch))


def test_a_finite_gradient_of_0_between_two_steps_without_parts_them(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, max_nonfinite_steps=2, staleness_mask=1), make_batch(tiny_model)
    learner.train(poisoned(batch))
    learner.train(of_age(batch, 2))
    learner.train(poisoned(batch))
    with pytest.raises(TrainingDiverged):
        learner.train(poisoned(batch))


def test_a_loss_that_is_not_finite_counts_also_with_a_gradient_of_0(tiny_model: Path) -> None:
    learner = make_learner(tiny_model)
    training = learner.begin(make_batch(tiny_model))
    gradients = learner.accumulate(training, training.mini_batches[0])
    gradients.norm, gradients.totals["policy"] = 0.0, math.nan
    learner.apply(gradients)
    assert learner.finish(training).metrics["train/nonfinite"] == 1.0


def test_the_gradient_norm_is_reported_before_clipping_and_bounds_the_step(tiny_model: Path) -> None:
    batch = make_batch(tiny_model)
    free = make_learner(tiny_model, max_grad_norm=0.0)
    norm = free.train(batch).metrics["train/grad_norm"]
    bounded = make_learner(tiny_model, max_grad_norm=norm / 10)
    assert bounded.train(batch).metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    total = sum(
        float(master.grad.square().sum()) for master in bounded.policy.masters.values() if master.grad is not None
    )
    assert total**0.5 == pytest.approx(norm / 10, rel=1e-3)


def test_the_rate_warms_up_over_optimizer_steps(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, warmup_steps=4), make_batch(tiny_model)
    assert [learner.train(batch).metrics["train/lr"] for _ in range(5)] == pytest.approx(
        [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3]
    )


def test_epochs_and_mini_batches_take_several_optimizer_steps_a_batch(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, epochs_per_batch=3, mini_batches=2)
    assert learner.train(make_batch(tiny_model)).updates == learner.updates == 6


def test_no_weight_moves_before_its_gradients_are_applied(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, mini_batches=2)
    before = weights_of(learner)
    training = learner.begin(make_batch(tiny_model))
    gradients = learner.accumulate(training, training.mini_batches[0])
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())
    learner.apply(gradients)
    assert not all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def test_two_epochs_are_two_steps_on_the_same_rollouts(tiny_model: Path) -> None:
    batch = make_batch(tiny_model)
    once, twice = make_learner(tiny_model), make_learner(tiny_model, epochs_per_batch=2)
    once.train(batch)
    once.train(batch)
    twice.train(batch)
    assert_same_weights(once, twice)


def test_a_stop_leaves_the_weights_of_the_step_before(tiny_model: Path) -> None:
    learner = make_learner(tiny_model)
    before = weights_of(learner)
    training = learner.begin(make_batch(tiny_model), should_stop=lambda: True)
    with pytest.raises(StopRequestedError):
        learner.accumulate(training, training.mini_batches[0])
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def test_logprobs_of_the_current_version_align_to_the_noise(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model), make_batch(tiny_model, version=7)
    alignment = Alignment(learner, keep=0, sample_sequences=4, seed=0)
    alignment.published(7)
    metrics = alignment.measure(learner.train(batch), alignment.score_older(batch))
    assert metrics["alignment/tokens"] == len(batch.targets)
    assert metrics["alignment/diff_max"] < 1e-4
    assert metrics["alignment/diff_abs_mean"] < 5e-6


def test_older_tokens_are_compared_under_their_own_versions_weights(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, lr=0.05), make_batch(tiny_model, version=1)
    alignment = Alignment(learner, keep=2, sample_sequences=4, seed=0)
    alignment.published(1)
    learner.train(batch)
    alignment.published(2)
    older = alignment.score_older(batch)
    assert 0 < len(older) < len(batch.targets)
    assert older.abs().max() < 1e-4
    metrics = alignment.measure(learner.train(batch), older)
    assert metrics["alignment/tokens"] == len(older)
    assert metrics["alignment/diff_max"] < 1e-4


def test_versions_that_are_no_longer_kept_are_not_compared(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model), make_batch(tiny_model, version=1)
    alignment = Alignment(learner, keep=1, sample_sequences=4, seed=0)
    for version in (1, 2, 3):
        alignment.published(version)
    assert len(alignment.score_older(batch)) == 0


def test_wrong_weights_show_in_the_alignment(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, lr=0.05), make_batch(tiny_model, version=1)
    alignment = Alignment(learner, keep=0, sample_sequences=0, seed=0)
    learner.train(batch)
    alignment.published(1)
    assert alignment.measure(learner.train(batch), torch.empty(0))["alignment/diff_max"] > 1e-2


def test_an_ordinary_model_gets_the_layout_without_repeated_prompts(policy: Policy) -> None:
    assert choose_layout(policy) == "shared"


def test_a_model_that_changes_its_logits_after_the_head_is_refused(policy: Policy) -> None:
    policy.hf_config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping is 30"):
        choose_layout(policy)


@pytest.mark.parametrize("masters", ["fp32", "none"])
def test_a_policy_served_in_bf16_trains_packed_and_agrees_with_its_sampler(tiny_model: Path, masters: str) -> None:
    config = make_config(tiny_model, dtype="bfloat16")
    options = PolicyOptions(model_name=str(tiny_model), dtype="bfloat16", device="cpu", master_weights=masters)  # type: ignore[arg-type]
    policy = load_policy(options)
    assert choose_layout(policy) == "shared"
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    objective = make_objective(config, policy)
    learner = Learner(policy, optimizer, config, objective=objective, layout="shared")
    batch = make_batch(tiny_model)
    before = weights_of(learner)
    result = learner.train(batch)
    assert result.logprobs is not None
    gap = (result.logprobs - batch.targets.rollout_logprobs).abs()  # the sampler computes in fp32
    assert gap.max() < 0.1
    assert gap.mean() < 0.02
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


@pytest.mark.parametrize("settings", [{}, {"entropy_coef": 0.1}], ids=["masked", "with another term"])
def test_a_batch_whose_tokens_are_all_too_old_moves_no_weight_unless_another_term_does(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    """An optimizer's step on a gradient of 0 would move the weights, by momentum and weight decay."""
    learner = make_learner(tiny_model, staleness_mask=1, weight_decay=0.1, **settings)
    batch = make_batch(tiny_model)
    assert learner.train(of_age(batch, 1)).updates == 1
    before = weights_of(learner)
    result = learner.train(of_age(batch, 2))
    moved = any(not torch.equal(before[name], now) for name, now in weights_of(learner).items())
    assert (result.updates, moved) == ((1, True) if settings else (0, False))
    assert (result.metrics["train/skipped"], result.metrics["train/nonfinite"]) == (0.0 if settings else 1.0, 0.0)
    assert ("whose gradient is 0" in caplog.text) == (not settings)


def test_a_mini_batch_whose_tokens_are_all_too_old_is_left_out_and_the_others_are_trained(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, staleness_mask=1, weight_decay=0.1, mini_batches=2)
    batch = make_batch(tiny_model)
    halves = learner.begin(batch).mini_batches
    ages = torch.zeros_like(batch.targets.versions)
    for row in halves[1]:
        ages[row.first_target : row.first_target + len(row.targets)] = 2
    training = learner.begin(replace(batch, targets=replace(batch.targets, ages=ages)))
    learner.apply(learner.accumulate(training, training.mini_batches[0]))
    half = weights_of(learner)
    learner.apply(learner.accumulate(training, training.mini_batches[1]))
    assert all(torch.equal(half[name], now) for name, now in weights_of(learner).items())
    result = learner.finish(training)
    assert (result.updates, learner.updates) == (1, 1)
    assert (result.metrics["train/skipped"], result.metrics["train/nonfinite"]) == (0.0, 0.0)
