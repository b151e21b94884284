"""Losses by name besides the clipped ones: gradients in closed form, and their relation to GRPO."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from example_trainer.objective.losses import LossInputs, LossSettings, is_clipped, token_losses, token_weights
from example_trainer.objective.metrics import policy_metrics
from example_trainer.objective.surrogates import outward_squares, second_moment_cut

TOKENS = torch.zeros(3, dtype=torch.long)
"""Three tokens of one sequence."""


def gradient(logs: Tensor, advantage: float, settings: LossSettings, sequences: Tensor | None = None) -> Tensor:
    """Return the gradient of the summed loss at log-ratios `logs` to rollout logprobs of -1."""
    logprobs = (logs - 1.0).requires_grad_()
    values = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones_like(logs),
        rollout_logprobs=torch.full_like(logs, -1.0),
        advantages=torch.full_like(logs, advantage),
        sequences=torch.arange(len(logs)) if sequences is None else sequences,
    )
    token_losses(values, settings).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("ratio", [0.1, 0.7, 1.0, 1.6, 8.0])
@pytest.mark.parametrize(("advantage", "temperature"), [(1.5, 1.0), (-1.5, 1.05)])
def test_sapo_s_gate_falls_smoothly_on_both_sides_of_ratio_one(
    ratio: float, advantage: float, temperature: float
) -> None:
    found = gradient(torch.tensor([math.log(ratio)]), advantage, LossSettings(loss_type="sapo"))
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    # fp32 rounds 1 - sigmoid at a ratio of 8.
    assert found.item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, rel=1e-3)


def test_a_higher_temperature_of_sapo_lets_less_through_far_from_ratio_one() -> None:
    logs, plain = torch.tensor([math.log(3.0)]), LossSettings(loss_type="sapo")
    hot = LossSettings(loss_type="sapo", sapo_temperature_pos=4.0)
    assert abs(gradient(logs, 1.0, hot).item()) < 0.1 * abs(gradient(logs, 1.0, plain).item())
    assert torch.equal(gradient(logs, -1.0, hot), gradient(logs, -1.0, plain))


@pytest.mark.parametrize(
    ("advantage", "kept"), [(1.0, [True, True, False]), (-1.0, [False, True, True])], ids=["rises", "falls"]
)
def test_gmpo_bounds_each_token_before_the_sequence_s_geometric_mean(advantage: float, kept: list[bool]) -> None:
    settings = LossSettings(loss_type="gmpo", clip_eps_low=0.4, clip_eps_high=0.4)
    logs = torch.tensor([-0.9, 0.1, 0.7])
    bounded = [-0.9, 0.1, 0.4] if advantage > 0 else [-0.4, 0.1, 0.7]
    ratio = math.exp(sum(bounded) / 3)
    expected = [-advantage * ratio if is_kept else 0.0 for is_kept in kept]
    # The three tokens' losses are the sequence's, so their sum has three times the gradient of their mean.
    assert gradient(logs, advantage, settings, TOKENS).tolist() == pytest.approx(expected, rel=1e-5)
    assert is_clipped(logs.exp(), torch.full((3,), advantage), settings).tolist() == [not each for each in kept]


@pytest.mark.parametrize(("advantage", "power", "decay"), [(2.0, 2.0, 3.0), (-2.0, 3.0, 2.0)])
@pytest.mark.parametrize("product", [0.3, 1.0, 2.5])
def test_vespo_weighs_a_sequence_by_its_whole_ratio_and_stops_its_gradient(
    advantage: float, power: float, decay: float, product: float
) -> None:
    logs = torch.tensor([0.5, -0.2, math.log(product) - 0.3])
    weight = product**power * math.exp(decay * (1 - product))
    found = gradient(logs, advantage, LossSettings(loss_type="vespo"), TOKENS)
    assert found.tolist() == pytest.approx([-advantage * weight] * 3, rel=1e-4)


def test_vespo_keeps_sequences_apart_and_stays_finite_at_any_drift() -> None:
    settings = LossSettings(loss_type="vespo")
    logs, sequences = torch.tensor([19.0, 19.0, 0.0, -19.0, -19.0]), torch.tensor([4, 4, 7, 9, 9])
    found = gradient(logs, 1.0, settings, sequences)
    assert found.tolist() == pytest.approx([0.0, 0.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_luspo_is_gspo_with_each_sequence_weighed_by_its_length() -> None:
    counts = torch.tensor([2, 6])
    sequences = torch.arange(2).repeat_interleave(counts)
    logs = torch.tensor([0.1, -0.1, 0.0, 0.05, 0.1, -0.2, 0.1, 0.0])

    def step(loss_type: str, aggregation: str) -> Tensor:
        logprobs = (logs - 1.0).requires_grad_()
        values = LossInputs(
            logprobs=logprobs,
            entropies=torch.ones(8),
            rollout_logprobs=torch.full((8,), -1.0),
            advantages=torch.tensor([1.0, -2.0])[sequences],
            sequences=sequences,
        )
        settings = LossSettings(loss_type=loss_type)
        weights = token_weights(counts, aggregation, 10)  # type: ignore[arg-type]
        (token_losses(values, settings) * weights).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    by_length = (counts / 10)[sequences]
    torch.testing.assert_close(step("luspo", "constant"), step("gspo", "sequence") * by_length)


def test_m2po_leaves_out_the_largest_steps_away_from_the_sampler_until_the_second_moment_is_small_enough() -> None:
    logs, advantages = torch.tensor([0.1, -0.5, 0.9, 0.3, -0.8, 0.0]), torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -1.0])
    squares, outward = outward_squares(logs, advantages)
    assert outward.tolist() == [True, True, True, True, False, False], "it returns, or has not moved"
    # Squares 0.01, 0.09, 0.25 and 0.81: the mean of all is 0.29, of three 0.117, of two 0.05.
    cuts = {0.3: math.inf, 0.2: 0.81, 0.1: 0.25, 0.04: 0.09, 0.001: 0.01}
    for threshold, cut in cuts.items():
        found = second_moment_cut(squares[outward], threshold)
        assert found == pytest.approx(cut)
        kept = squares[outward][squares[outward] < found]
        assert not len(kept) or kept.mean() <= threshold
    assert second_moment_cut(torch.zeros(0), 0.04) == math.inf


def test_of_equal_steps_m2po_leaves_out_all_or_none() -> None:
    squares = torch.tensor([0.01, 0.09, 0.09])
    assert second_moment_cut(squares, 0.05) == pytest.approx(0.09)
    assert second_moment_cut(squares, 0.064) == math.inf


def test_m2po_does_not_clip_what_it_trusts_and_learns_nothing_from_the_rest() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    values = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones(3),
        rollout_logprobs=torch.tensor([-3.0, -0.5, -1.2]),
        advantages=torch.tensor([1.0, -1.0, 2.0]),
        sequences=TOKENS,
        trusted=torch.tensor([True, True, False]),
    )
    settings = LossSettings(loss_type="m2po")
    token_losses(values, settings).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(2.0), math.exp(-0.5), 0.0])
    found = policy_metrics(replace(values, logprobs=logprobs.detach()), settings)
    # Outward are the tokens at log-ratios 2, -0.5 and 0.2; the last is masked.
    assert found["grpo/second_moment"] == pytest.approx((4 + 0.25 + 0.04) / 3)
    assert found["grpo/second_moment_kept"] == pytest.approx((4 + 0.25) / 2)
    assert found["grpo/clipped_fraction"] == pytest.approx(1 / 3)


def test_gpg_is_reinforce_whatever_the_ratio() -> None:
    logs = torch.tensor([-2.0, 0.0, 2.0])
    assert gradient(logs, 1.5, LossSettings(loss_type="gpg")).tolist() == [-1.5] * 3


@pytest.mark.parametrize("loss_type", ["luspo", "gmpo", "sapo", "vespo", "gpg", "dppo", "m2po"])
def test_each_has_the_gradient_of_grpo_while_rollouts_are_fresh(loss_type: str) -> None:
    fresh = torch.zeros(3)
    torch.testing.assert_close(
        gradient(fresh, -1.5, LossSettings(loss_type=loss_type), TOKENS),
        gradient(fresh, -1.5, LossSettings(), TOKENS),
    )


@pytest.mark.parametrize(
    ("sampled", "now", "advantage", "kept"),
    [
        (0.60, 0.70, 1.0, True),
        (0.60, 0.80, 1.0, False),
        (0.60, 0.30, 1.0, True),  # it comes back
        (0.60, 0.40, -1.0, False),
        (0.60, 0.90, -1.0, True),
        (1e-5, 1e-3, 1.0, True),  # a ratio of 100 that hardly moves the distribution
    ],
)
def test_dppo_masks_a_token_by_the_distance_its_probability_has_moved(
    sampled: float, now: float, advantage: float, kept: bool
) -> None:
    settings = LossSettings(loss_type="dppo", clip_eps_low=0.15, clip_eps_high=0.15, cispo_cap=5.0)
    logprobs = torch.tensor([math.log(now)], requires_grad=True)
    values = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones(1),
        rollout_logprobs=torch.tensor([math.log(sampled)]),
        advantages=torch.tensor([advantage]),
        sequences=torch.zeros(1, dtype=torch.long),
    )
    token_losses(values, settings).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-min(now / sampled, 5.0) * advantage if kept else 0.0, rel=1e-4)
    ratios = torch.tensor([now / sampled])
    assert is_clipped(ratios, values.advantages, settings, logprobs=logprobs).tolist() == [not kept]
