"""Importance corrections: one-ratio weights, the trainer's gap to its sampler, the off-policy mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from example_trainer.objective.losses import LossInputs, LossSettings, Targets, loss_terms, token_losses
from example_trainer.objective.metrics import policy_metrics
from example_trainer.objective.objective import Objective
from example_trainer.objective.ratios import mismatch_weights, off_policy_mask

BOUNDS = {"floor": 0.5, "cap": 2.0, "clamp": 20.0}


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios).log() - 3.0


def inputs(new: Tensor, rollout: Tensor, advantages: Tensor, **more: Tensor) -> LossInputs:
    values = {
        "logprobs": new,
        "entropies": torch.zeros_like(new),
        "rollout_logprobs": rollout,
        "advantages": advantages,
        "sequences": torch.arange(len(new)),
    }
    return LossInputs(**(values | more))


def gradient(values: LossInputs, settings: LossSettings) -> list[float]:
    token_losses(values, settings).sum().backward()
    assert values.logprobs.grad is not None
    found: list[float] = values.logprobs.grad.tolist()
    return found


@pytest.mark.parametrize(("ratio", "weight"), [(0.4, 0.0), (0.6, 0.6), (1.0, 1.0), (1.9, 1.9), (2.1, 0.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_masked_importance_weights_silence_what_is_too_far_off(ratio: float, weight: float, advantage: float) -> None:
    settings = LossSettings(importance_sampling="masked", tis_cap=2.0, tis_floor=0.5)
    new = logs(ratio).requires_grad_()
    assert gradient(inputs(new, logs(1.0), torch.tensor([advantage])), settings) == pytest.approx([-advantage * weight])


def test_a_floor_lifts_truncated_weights() -> None:
    settings = LossSettings(importance_sampling="truncated", tis_cap=2.0, tis_floor=0.5)
    new = logs(0.1, 1.0, 9.0).requires_grad_()
    found = gradient(inputs(new, logs(1.0, 1.0, 1.0), torch.ones(3)), settings)
    assert found == pytest.approx([-0.5, -1.0, -2.0])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("token_truncate", [0.5, 1.0, 1.5, 2.0]),
        ("token_mask", [0.0, 1.0, 1.5, 0.0]),
        # Geometric means of the two sequences: sqrt(0.25) = 0.5 and sqrt(1.5 * 6) = 3.
        ("sequence_truncate", [0.5, 0.5, 2.0, 2.0]),
        ("sequence_mask", [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_the_gap_between_trainer_and_sampler_is_weighed_by_token_or_sequence(
    correction: str, expected: list[float]
) -> None:
    found = mismatch_weights(
        logs(0.25, 1.0, 1.5, 6.0),
        logs(1.0, 1.0, 1.0, 1.0),
        torch.tensor([7, 7, 9, 9]),
        correction,  # type: ignore[arg-type]
        **BOUNDS,
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_p5_a_sequences_weight_does_not_grow_with_its_length() -> None:
    """A sum of log-ratios would pass any cap once the answer is long enough."""
    lengths = torch.tensor([2, 300])
    sequences = torch.arange(2).repeat_interleave(lengths)
    found = mismatch_weights(
        torch.full((302,), -1.0),
        torch.full((302,), -1.1),
        sequences,
        "sequence_truncate",
        floor=0.0,
        cap=2.0,
        clamp=20.0,
    )
    torch.testing.assert_close(found, torch.full((302,), 0.1).exp())


def test_recomputed_old_logprobs_put_the_ratio_at_one_and_leave_the_gap_to_the_weight() -> None:
    settings = LossSettings(old_logprobs="recomputed", mismatch_correction="token_truncate", tis_cap=2.0)
    new = logs(5.0, 1.5).requires_grad_()
    found = gradient(inputs(new, logs(1.0, 1.0), torch.tensor([1.0, -1.0])), settings)
    # With the sampler's logprobs the first token would be clipped and have no gradient.
    assert found == pytest.approx([-2.0, 1.5])


def test_after_the_first_update_the_clip_is_against_the_weights_the_batch_began_with() -> None:
    settings = LossSettings(old_logprobs="recomputed", mismatch_correction="token_truncate", tis_cap=2.0)
    new = logs(1.3, 1.1).requires_grad_()
    values = inputs(new, logs(0.8, 0.8), torch.ones(2), proximal_logprobs=logs(1.0, 1.0))
    assert gradient(values, settings) == pytest.approx([0.0, -1.1 * 1.25])


def test_no_gradient_flows_through_the_weights() -> None:
    """A weight that could be learnt would be pushed down wherever the advantage is negative."""
    new = logs(1.1).requires_grad_()
    settings = LossSettings(loss_type="no_baseline", old_logprobs="recomputed", mismatch_correction="token_truncate")
    values = inputs(new, logs(1.0), torch.tensor([2.0]))
    assert gradient(values, settings) == pytest.approx([-2.0 * 1.1])


def test_the_off_policy_mask_silences_negative_tokens_of_sequences_that_drifted_away() -> None:
    sequences = torch.tensor([0, 0, 1, 1, 2])
    rollout, new = torch.zeros(5), torch.tensor([-0.3, -0.1, -0.1, -0.05, -9.0])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0])
    keep = off_policy_mask(new, rollout, advantages, sequences, 0.1)
    assert keep.tolist() == [False, True, True, True, True]
    settings = LossSettings(off_policy_threshold=0.1, clip_eps_low=0.9)
    values = inputs(new.requires_grad_(), rollout, advantages, sequences=sequences)
    assert [value != 0.0 for value in gradient(values, settings)] == keep.tolist()


def test_p29_mismatch_metrics_are_those_before_any_weight_is_cut() -> None:
    settings = LossSettings(old_logprobs="recomputed", mismatch_correction="token_mask", tis_cap=2.0)
    metrics = policy_metrics(inputs(logs(1.0, 9.0), logs(1.0, 1.0), torch.ones(2)), settings)
    assert metrics["mismatch/mean_ratio"] == pytest.approx(5.0)
    assert metrics["mismatch/max_ratio"] == pytest.approx(9.0, rel=1e-5)
    assert metrics["mismatch/bounded_fraction"] == 0.5
    assert metrics["grpo/mean_ratio"] == pytest.approx(5.0)
    assert metrics["grpo/clipped_fraction"] == 0.0


def test_the_share_of_silenced_tokens_is_measured() -> None:
    settings = LossSettings(off_policy_threshold=0.1)
    metrics = policy_metrics(inputs(torch.tensor([-5.0, -1.0]), torch.full((2,), -1.0), -torch.ones(2)), settings)
    assert metrics["grpo/off_policy_fraction"] == 0.5


def test_p4_tokens_of_truncated_sampling_are_weighed_and_never_clipped() -> None:
    """Top-p alone moves their ratio, so a clip would drop them for a gap that the policy did not cause."""
    new = logs(1.5, 1.5, 4.0).requires_grad_()
    marked = torch.tensor([True, False, True])
    values = inputs(new, logs(1.0, 1.0, 1.0), torch.ones(3), truncated_sampling=marked)
    assert gradient(values, LossSettings(tis_cap=2.0)) == pytest.approx([-1.5, 0.0, -2.0])


def test_the_metrics_count_no_token_of_truncated_sampling_as_clipped() -> None:
    new, marked = logs(0.7, 0.7, 1.0, 1.0), torch.tensor([True, False, True, False])
    values = inputs(new, logs(1.0, 1.0, 1.0, 1.0), -torch.ones(4), truncated_sampling=marked)
    targets = Targets(
        labels=torch.zeros(4, dtype=torch.long),
        rollout_logprobs=values.rollout_logprobs,
        advantages=values.advantages,
        temperatures=torch.ones(4),
        sequences=values.sequences,
        versions=torch.zeros(4, dtype=torch.long),
        version_bounds=torch.zeros(4, dtype=torch.long),
        truncated_sampling=marked,
    )
    metrics = Objective(LossSettings()).metrics(targets, new, values.entropies)
    assert metrics["grpo/clipped_fraction"] == metrics["perf/zero_gradient_fraction"] == 0.25
    new.requires_grad_()
    assert gradient(values, LossSettings()).count(0.0) == 1


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(off_policy_threshold=0.2, clip_eps_low=0.95),
        LossSettings(old_logprobs="recomputed", mismatch_correction="token_mask", tis_floor=0.5),
        LossSettings(old_logprobs="recomputed", mismatch_correction="sequence_mask", tis_floor=0.5),
        LossSettings(importance_sampling="masked", tis_floor=0.5),
    ],
    ids=lambda settings: f"{settings.importance_sampling}-{settings.mismatch_correction}",
)
def test_the_tokens_without_gradient_that_are_counted_are_those_without_any(settings: LossSettings) -> None:
    new = logs(0.1, 1.0, 0.9, 1.0)
    values = inputs(new, logs(1.0, 1.0, 1.0, 1.0), -torch.ones(4))
    assert policy_metrics(values, settings)["perf/zero_gradient_fraction"] == 0.25
    new.requires_grad_()
    assert gradient(values, settings).count(0.0) == 1


def test_where_every_token_is_weighed_anyway_the_mark_changes_nothing() -> None:
    settings = LossSettings(old_logprobs="recomputed", mismatch_correction="token_truncate", tis_cap=2.0)
    found = []
    for marked in (True, False):
        new = logs(1.5, 4.0).requires_grad_()
        values = inputs(new, logs(1.0, 1.0), torch.ones(2), truncated_sampling=torch.full((2,), marked))
        found.append(gradient(values, settings))
    assert found[0] == found[1]


AGES = torch.tensor([0, 1, 2, 3, -1])


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (LossSettings(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (LossSettings(staleness_mask=1), [1.0, 1.0, 0.0, 0.0, 1.0]),
        (LossSettings(staleness_mask=0), [1.0, 0.0, 0.0, 0.0, 1.0]),
        (LossSettings(staleness_decay=0.5), [1.0, 0.5, 0.25, 0.125, 1.0]),
        (LossSettings(staleness_mask=2, staleness_decay=0.5), [1.0, 0.5, 0.25, 0.0, 1.0]),
        (LossSettings(loss_type="cispo", staleness_decay=0.5), [1.0, 0.5, 0.25, 0.125, 1.0]),
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_s_gradient_is_weighted_by_the_age_of_its_own_version(
    settings: LossSettings, weights: list[float], advantage: float
) -> None:
    """All five are of one sequence; the last one's age is unknown, so its weight does not change."""
    whole = {"sequences": torch.zeros(5, dtype=torch.long), "ages": AGES}
    new = logs(1.0, 1.1, 1.1, 1.1, 1.1).requires_grad_()
    old, gains = logs(1.0, 1.0, 1.0, 1.0, 1.0), torch.full((5,), advantage)
    found = gradient(inputs(new, old, gains, **whole), settings)
    unweighed = LossSettings(loss_type=settings.loss_type)
    plain = gradient(inputs(new.detach().requires_grad_(), old, gains, **whole), unweighed)
    assert all(plain)
    assert found == pytest.approx([weight * value for weight, value in zip(weights, plain, strict=True)])


def test_the_age_of_a_token_weighs_neither_the_divergence_nor_the_entropy() -> None:
    more = {"reference_logprobs": logs(2.0, 2.0), "entropies": torch.ones(2), "ages": torch.tensor([0, 9])}
    terms = loss_terms(
        inputs(logs(1.0, 1.0), logs(1.0, 1.0), torch.ones(2), **more),
        LossSettings(staleness_mask=0, kl_coef=1.0, entropy_coef=1.0),
    )
    assert terms["policy"].tolist() == [-1.0, 0.0]
    assert terms["kl"][0] == terms["kl"][1] != 0
    assert terms["entropy"].tolist() == [-1.0, -1.0]


def test_the_mean_weight_and_the_silenced_tokens_of_age_are_in_the_metrics() -> None:
    values = inputs(logs(1.0, 1.0, 1.0, 1.0, 1.0), logs(1.0, 1.0, 1.0, 1.0, 1.0), torch.ones(5), ages=AGES)
    found = policy_metrics(values, LossSettings(staleness_mask=1))
    assert found["staleness/weight_mean"] == pytest.approx(0.6)
    assert found["perf/zero_gradient_fraction"] == pytest.approx(0.4)
    assert "staleness/weight_mean" not in policy_metrics(values, LossSettings())
