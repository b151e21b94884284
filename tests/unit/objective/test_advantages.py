"""Advantages: baselines, scales, groups without signal."""

from __future__ import annotations

import pytest
import torch

from example_trainer.objective.advantages import (
    AdvantageSettings,
    compute_advantages,
    has_signal,
    is_zero_variance,
    shuffle,
)

NONE = AdvantageSettings(norm="none")


def advantages(rewards: list[float], settings: AdvantageSettings) -> list[float]:
    return compute_advantages([rewards], settings)[0].tolist()


def test_the_baseline_is_the_groups_own_mean() -> None:
    first, second = compute_advantages([[1.0, 0.0], [10.0, 20.0, 30.0]], NONE)
    assert first.tolist() == [0.5, -0.5]
    assert second.tolist() == [-10.0, 0.0, 10.0]


def test_sample_std_is_the_form_with_n_minus_one_and_an_added_epsilon() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (rewards.std(correction=1) + 1e-4)
    assert advantages(rewards.tolist(), AdvantageSettings()) == pytest.approx(expected.tolist())


def test_population_std_is_the_form_with_n_and_a_floor() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / rewards.std(correction=0)
    assert advantages(rewards.tolist(), AdvantageSettings(std="population")) == pytest.approx(expected.tolist())


def test_batch_std_scales_all_groups_alike() -> None:
    groups = [[0.0, 1.0], [0.0, 10.0]]
    scaled = torch.cat(compute_advantages(groups, AdvantageSettings(norm="batch", std="population")))
    plain = torch.cat(compute_advantages(groups, NONE))
    assert (plain / scaled).std().item() == pytest.approx(0.0, abs=1e-5)
    assert scaled.std(correction=0).item() == pytest.approx(1.0, rel=1e-5)


def test_batch_std_in_trls_form_is_that_of_the_raw_rewards_of_the_batch() -> None:
    groups = [[0.0, 1.0], [0.0, 10.0]]
    raw = torch.tensor([0.0, 1.0, 0.0, 10.0]).std(correction=1) + 1e-4
    scaled = torch.cat(compute_advantages(groups, AdvantageSettings(norm="batch", std="sample")))
    torch.testing.assert_close(scaled, torch.tensor([-0.5, 0.5, -5.0, 5.0]) / raw)


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_p26_a_group_is_centred_by_its_own_prompt_whatever_else_is_in_the_batch(norm: str, std: str) -> None:
    """Advantages across prompts would reward easy prompts and punish hard ones."""
    settings = AdvantageSettings(norm=norm, std=std)  # type: ignore[arg-type]
    hard, easy = compute_advantages([[0.0, 0.2], [0.8, 1.0]], settings)
    torch.testing.assert_close(hard, easy)
    assert hard[0] < 0 < hard[1]


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_adding_a_constant_to_all_rewards_changes_nothing(norm: str) -> None:
    settings = AdvantageSettings(norm=norm)  # type: ignore[arg-type]
    plain = compute_advantages([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], settings)
    shifted = compute_advantages([[1.0, 2.0, 2.0], [2.0, 1.0, 1.0]], settings)
    for left, right in zip(plain, shifted, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_without_a_baseline_a_constant_does_change_the_advantages() -> None:
    settings = AdvantageSettings(baseline="none", norm="none")
    assert advantages([0.0, 1.0], settings) == [0.0, 1.0]
    assert advantages([1.0, 2.0], settings) == [1.0, 2.0]


def test_leave_one_out_is_the_centred_reward_times_a_constant() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    leave_one_out = [reward - (sum(rewards) - reward) / 4 for reward in rewards]
    assert [value * 5 / 4 for value in advantages(rewards, NONE)] == pytest.approx(leave_one_out)


@pytest.mark.parametrize("settings", [NONE, AdvantageSettings(), AdvantageSettings(std="population")])
def test_a_group_of_one_has_no_baseline_and_gets_zero(settings: AdvantageSettings) -> None:
    assert advantages([3.5], settings) == [0.0]


def test_equal_rewards_are_recognised_by_their_range_and_not_by_a_noisy_std() -> None:
    noisy = [0.1 + 0.2, 0.3, 0.3]
    assert is_zero_variance(noisy)
    assert advantages(noisy, AdvantageSettings()) == [0.0, 0.0, 0.0]
    assert not is_zero_variance([0.0, 1e-3])


def test_signal_is_a_difference_under_a_baseline_and_any_reward_without_one() -> None:
    no_baseline = AdvantageSettings(baseline="none", norm="none")
    assert not has_signal([1.0, 1.0], NONE)
    assert has_signal([1.0, 0.0], NONE)
    assert has_signal([1.0, 1.0], no_baseline)
    assert not has_signal([0.0, 0.0], no_baseline)


def test_shuffling_keeps_the_values_and_follows_its_seed() -> None:
    values = torch.arange(20.0)
    first = shuffle(values, torch.Generator().manual_seed(3))
    again = shuffle(values, torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    assert not torch.equal(first, values)
    assert torch.equal(first.sort().values, values)
