"""Metrics: raw ratios, alignment, ages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from example_trainer.objective.losses import LossInputs, LossSettings
from example_trainer.objective.metrics import (
    alignment_metrics,
    policy_metrics,
    reward_metrics,
    staleness_metrics,
    token_ages,
)


def inputs(new: Tensor, old: Tensor, advantages: Tensor | None = None, **more: Tensor) -> LossInputs:
    """Return tokens, each of a sequence of its own."""
    return LossInputs(
        logprobs=new,
        entropies=torch.zeros_like(new),
        rollout_logprobs=old,
        advantages=torch.ones_like(new) if advantages is None else advantages,
        sequences=torch.arange(len(new)),
        **more,
    )


def test_ratios_are_reported_before_any_truncation() -> None:
    new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    settings = LossSettings(importance_sampling="truncated", tis_cap=2.0)
    metrics = policy_metrics(inputs(new, old), settings)
    ratios = [1.0, torch.tensor(2.0).exp().item()]
    assert metrics["grpo/mean_ratio"] == pytest.approx(sum(ratios) / 2)
    assert metrics["grpo/max_ratio"] == pytest.approx(ratios[1])
    assert metrics["grpo/clipped_fraction"] == 0.5


def test_tokens_without_a_gradient_are_counted_and_truncated_ones_are_not_among_them() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new, advantages = old + torch.tensor([0.5, 0.0, 0.5, 0.0]), torch.tensor([1.0, 1.0, -1.0, 0.0])
    counted = inputs(new, old, advantages)
    assert policy_metrics(counted, LossSettings())["perf/zero_gradient_fraction"] == 0.5
    truncated = policy_metrics(counted, LossSettings(importance_sampling="truncated", tis_cap=1.1))
    assert (truncated["grpo/clipped_fraction"], truncated["perf/zero_gradient_fraction"]) == (0.5, 0.25)


def test_logprobs_are_split_by_the_sign_of_the_advantage_over_trained_tokens_only() -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([1.0, 1.0, -1.0])
    metrics = policy_metrics(inputs(logprobs, logprobs, advantages), LossSettings())
    assert (metrics["train/pos_logp"], metrics["train/neg_logp"]) == (-1.5, -5.0)


def test_the_divergence_estimate_is_never_negative() -> None:
    torch.manual_seed(0)
    new, old = -torch.rand(100), -torch.rand(100)
    for above, below in ((new, old), (old, new)):  # the mean of the log-ratios is negative in one of the two
        assert policy_metrics(inputs(above, below), LossSettings())["train/kl"] > 0.0
    assert policy_metrics(inputs(new, new), LossSettings())["train/kl"] == 0.0


def test_alignment_says_when_there_was_nothing_to_compare() -> None:
    assert alignment_metrics(torch.empty(0)) == {"alignment/tokens": 0.0}
    metrics = alignment_metrics(torch.tensor([0.1, -0.3]))
    assert metrics["alignment/diff_max"] == pytest.approx(0.3)
    assert metrics["alignment/diff_mean"] == pytest.approx(-0.1)
    assert metrics["alignment/diff_abs_mean"] == pytest.approx(0.2)


def test_rewards_and_lengths_count_every_sequence_of_the_batch() -> None:
    metrics = reward_metrics([0.0, 1.0, 1.0, 1.0], [2, 4, 6, 8])
    assert (metrics["reward/mean"], metrics["response/length_mean"]) == (0.75, 5.0)


def test_r3_age_is_counted_in_steps_of_the_versions_and_never_below_zero() -> None:
    steps = {1: 0, 4: 1, 9: 2}  # versions jump; steps do not
    versions = torch.tensor([1, 4, 4, 9, 77, -1])
    assert token_ages(versions, steps, 2).tolist() == [2, 1, 1, 0, -1, -1]
    metrics = staleness_metrics(token_ages(versions, steps, 2))
    assert metrics["staleness/mean"] == pytest.approx((2 + 1 + 1 + 0) / 4)
    assert metrics["staleness/max"] == 2.0
    assert staleness_metrics(token_ages(torch.tensor([9]), steps, 1))["staleness/max"] == 0.0
    assert staleness_metrics(token_ages(torch.tensor([-1]), steps, 2)) == {"staleness/age_unknown": 1.0}


def test_the_histogram_of_ages_accounts_for_every_token() -> None:
    steps = {version: version for version in range(20)}
    versions = torch.tensor([19, 19, 18, 16, 15, 12, 11, 0, 99, -1])
    found = staleness_metrics(token_ages(versions, steps, 19))
    assert {name.removeprefix("staleness/age_"): share for name, share in found.items() if "age_" in name} == {
        "0": 0.2,
        "1": 0.1,
        "3": 0.1,
        "4_to_7": 0.2,
        "8_or_more": 0.2,
        "unknown": pytest.approx(0.2),
    }
    assert staleness_metrics(token_ages(torch.tensor([], dtype=torch.long), steps, 19)) == {}
