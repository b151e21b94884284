"""Losses: the flow and values of their gradients, and their denominators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from example_trainer.objective.losses import (
    LossInputs,
    LossSettings,
    clipped_losses,
    is_clipped,
    token_losses,
    token_weights,
)
from example_trainer.objective.ratios import log_ratios, sequence_means

# (advantage, ratio, gradient flows): PPO's pessimistic minimum, dual clip at 3.
CLIP_TABLE = [
    (+1.0, 0.50, True),
    (+1.0, 0.79, True),
    (+1.0, 1.00, True),
    (+1.0, 1.19, True),
    (+1.0, 1.21, False),
    (+1.0, 5.00, False),
    (-1.0, 0.50, False),
    (-1.0, 0.79, False),
    (-1.0, 0.81, True),
    (-1.0, 1.00, True),
    (-1.0, 1.21, True),
    (-1.0, 2.99, True),
    (-1.0, 3.01, False),
]


def inputs(logprobs: Tensor, advantages: Tensor, rollout: float = -1.0, **more: Tensor) -> LossInputs:
    """Return tokens, each a sequence of its own unless `sequences` is given."""
    values: dict[str, Tensor] = {
        "logprobs": logprobs,
        "entropies": torch.ones_like(logprobs),
        "rollout_logprobs": torch.full_like(logprobs, rollout),
        "advantages": advantages,
        "sequences": torch.arange(len(logprobs)),
    }
    return LossInputs(**(values | more))


def gradient(advantages: Tensor, ratios: Tensor, settings: LossSettings) -> Tensor:
    """Return the summed loss's gradient by the logprobs, at the given ratios to rollout logprobs of -1."""
    logprobs = (ratios.log() - 1.0).requires_grad_()
    token_losses(inputs(logprobs, advantages), settings).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize(("advantage", "ratio", "flows"), CLIP_TABLE)
def test_the_clip_stops_gradients_exactly_where_ppo_does(advantage: float, ratio: float, flows: bool) -> None:
    found = gradient(torch.tensor([advantage]), torch.tensor([ratio]), LossSettings())
    expected = -advantage * ratio if flows else 0.0
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("advantage", "ratio", "flows"), CLIP_TABLE)
def test_tokens_counted_as_clipped_are_those_without_gradient(advantage: float, ratio: float, flows: bool) -> None:
    assert bool(is_clipped(torch.tensor([ratio]), torch.tensor([advantage]), LossSettings())) is not flows


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo"])
@pytest.mark.parametrize(("advantage", "ratio", "flows"), CLIP_TABLE)
def test_dr_grpo_and_dapo_share_the_clipped_surrogate(
    loss_type: str, advantage: float, ratio: float, flows: bool
) -> None:
    found = gradient(torch.tensor([advantage]), torch.tensor([ratio]), LossSettings(loss_type=loss_type))
    assert found.item() == pytest.approx(-advantage * ratio if flows else 0.0, rel=1e-5)


@pytest.mark.parametrize(("advantage", "ratio", "flows"), CLIP_TABLE)
def test_gspo_clips_a_sequence_by_its_mean_ratio_and_shares_the_gradient_among_its_tokens(
    advantage: float, ratio: float, flows: bool
) -> None:
    spread = torch.tensor([0.3, -0.5, 0.2])
    logprobs = (math.log(ratio) + spread - 1.0).requires_grad_()
    values = inputs(logprobs, torch.full((3,), advantage), sequences=torch.zeros(3).long())
    token_losses(values, LossSettings(loss_type="gspo")).mean().backward()
    assert logprobs.grad is not None
    expected = -advantage * ratio / 3 if flows else 0.0
    assert logprobs.grad.tolist() == pytest.approx([expected] * 3, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (80.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_cuts_the_weight_and_keeps_the_token(ratio: float, weight: float, advantage: float) -> None:
    settings = LossSettings(loss_type="cispo", cispo_cap=5.0)
    found = gradient(torch.tensor([advantage]), torch.tensor([ratio]), settings)
    assert found.item() == pytest.approx(-advantage * weight, rel=1e-5)
    assert bool(is_clipped(torch.tensor([ratio]), torch.tensor([advantage]), settings)) == (ratio > 5.0)


def test_the_two_sides_of_the_clip_can_differ() -> None:
    settings = LossSettings(clip_eps_low=0.1, clip_eps_high=0.3)
    found = gradient(torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([1.25, 1.35, 0.95, 0.85]), settings)
    assert (found != 0).tolist() == [True, False, True, False]


def test_without_dual_clip_a_falling_token_is_pushed_at_any_ratio() -> None:
    found = gradient(torch.tensor([-1.0]), torch.tensor([50.0]), LossSettings(dual_clip=None))
    assert found.item() == pytest.approx(50.0, rel=1e-5)


def test_the_clipped_value_is_the_pessimistic_one() -> None:
    ratios, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    values = clipped_losses(ratios, advantages, LossSettings())
    assert values.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8])


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (1.9, 1.9), (7.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_truncated_importance_weights_keep_every_token_learning(ratio: float, weight: float, advantage: float) -> None:
    settings = LossSettings(importance_sampling="truncated", tis_cap=2.0)
    found = gradient(torch.tensor([advantage]), torch.tensor([ratio]), settings)
    assert found.item() == pytest.approx(-advantage * weight, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "no_baseline"])
def test_reinforce_is_minus_advantage_times_logprob(loss_type: str) -> None:
    logprobs = torch.tensor([-0.5, -2.0])
    settings = LossSettings(loss_type=loss_type)
    values = token_losses(inputs(logprobs, torch.tensor([2.0, -1.0])), settings)
    assert values.tolist() == pytest.approx([1.0, -2.0])


def test_clip_truncated_and_uncorrected_agree_while_rollouts_are_fresh() -> None:
    torch.manual_seed(0)
    advantages, ratios = torch.randn(64), torch.ones(64)
    clip = gradient(advantages, ratios, LossSettings())
    truncated = gradient(advantages, ratios, LossSettings(importance_sampling="truncated"))
    uncorrected = gradient(advantages, ratios, LossSettings(loss_type="reinforce_with_baseline"))
    assert torch.equal(clip, truncated)
    assert torch.equal(clip, uncorrected)


def test_fresh_gspo_has_the_gradient_of_per_sequence_grpo() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([3, 5, 1, 7])
    sequences = torch.arange(4).repeat_interleave(counts)
    advantages = torch.randn(4)[sequences]
    weights = token_weights(counts, "sequence", 1)

    def weighted(settings: LossSettings) -> Tensor:
        logprobs = torch.full((16,), -1.0, requires_grad=True)
        losses = token_losses(inputs(logprobs, advantages, sequences=sequences), settings)
        (losses * weights).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    torch.testing.assert_close(weighted(LossSettings(loss_type="gspo")), weighted(LossSettings()))


def test_a_sequence_ratio_does_not_depend_on_the_length() -> None:
    short, long = torch.full((2,), 0.1), torch.full((200,), 0.1)
    sequences = torch.cat([torch.zeros(2), torch.ones(200)]).long()
    found = sequence_means(torch.cat([short, long]), sequences)
    torch.testing.assert_close(found, torch.full((202,), 0.1))


def test_log_ratios_are_clamped_so_that_exp_stays_finite() -> None:
    logs = log_ratios(torch.tensor([-1.0, -500.0]), torch.tensor([-900.0, -1.0]), 20.0)
    assert logs.tolist() == [20.0, -20.0]
    assert all(math.isfinite(value) for value in logs.exp().tolist())


def test_losses_are_fp32_whatever_the_advantages_come_in() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16)
    values = token_losses(inputs(logprobs, torch.tensor([1.0])), LossSettings())
    assert values.dtype == torch.float32


def test_token_weights_add_up_to_one_over_the_whole_step() -> None:
    counts = torch.tensor([4, 1, 11])
    assert token_weights(counts, "token", 1).sum().item() == pytest.approx(1.0)
    assert token_weights(counts, "sequence", 1).sum().item() == pytest.approx(1.0)
    assert token_weights(counts, "token", 1).unique().numel() == 1
    assert token_weights(counts, "constant", 20).tolist() == pytest.approx([1 / 60] * 16)


def test_nothing_trained_gives_no_weights_and_no_division_by_zero() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    for aggregation in ("token", "sequence", "constant"):
        assert token_weights(empty, aggregation, 10).numel() == 0  # type: ignore[arg-type]
