"""The objective through the learner: reference, proximal logprobs, teacher, entropy, and the four exact identities."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atropos_api.wire import Batch, Group
from example_trainer.data import TrainingBatch, data_settings, prepare_batch
from example_trainer.errors import ModelNotFound
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.micro_batches import LayoutKind
from example_trainer.objective.reference_policy import Reference
from example_trainer.testing import Sampler, make_tiny_model
from example_trainer.training import Learner

from .test_training import make_config, make_learner, weights_of


def parity(answer: Sequence[int]) -> float:
    return float(sum(answer) % 3)


def sample(model: Path, *, reward: Callable[[Sequence[int]], float] = parity) -> Batch:
    sampler = Sampler(model, seed=1)
    weights = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu")).snapshot()
    made = [sampler.sample(weights, 1, reward, group_size=4) for _ in range(4)]
    return Batch(number=1, run_id="r", groups=made)


@pytest.fixture(scope="module")
def recorded(tiny_model: Path) -> Batch:
    """Rollouts, which tests must not change."""
    return sample(tiny_model)


def prepare(model: Path, batch: Batch, **settings: Any) -> TrainingBatch:
    return prepare_batch(batch, data_settings(make_config(model, **settings)))


def stale(batch: TrainingBatch, spread: float = 0.6) -> TrainingBatch:
    """Return the batch as if sampled by other weights, with ratios from a third to three."""
    noise = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(4)) * spread
    return replace(batch, targets=replace(batch.targets, rollout_logprobs=batch.targets.rollout_logprobs + noise))


def gradients(learner: Learner, batch: TrainingBatch) -> dict[str, Tensor]:
    learner.train(batch)
    return gradients_of(learner)


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    return {name: master.grad.clone() for name, master in learner.policy.masters.items() if master.grad is not None}


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance)


EVERY_TERM = {"kl_coef": 0.1, "entropy_coef": 0.05}
FORMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", **EVERY_TERM},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "off_policy_mask": 0.05},
    "gspo": {"loss_type": "gspo", "clip_eps": 0.2, "clip_eps_high": 0.3},
    "cispo": {"loss_type": "cispo", "cispo_cap": 1.5},
    "luspo": {"loss_type": "luspo", "clip_eps": 0.2, "clip_eps_high": 0.3},
    "gmpo": {"loss_type": "gmpo", "clip_eps": 0.1, "clip_eps_high": 0.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gpg": {"loss_type": "gpg"},
    "dppo": {"loss_type": "dppo"},
    "m2po": {"loss_type": "m2po", "m2_threshold": 0.05},
    "reinforce": {"loss_type": "reinforce_with_baseline"},
    "truncated": {"importance_sampling": "truncated", "tis_cap": 1.5},
    "masked": {"importance_sampling": "masked", "tis_cap": 1.5, "tis_floor": 0.5},
    "sequence mask": {"old_logprobs": "recomputed", "mismatch_correction": "sequence_mask", "tis_cap": 1.2},
}


@pytest.mark.parametrize("form", FORMS)
def test_p2_neither_micro_batch_split_nor_packing_changes_loss_or_gradient(
    tiny_model: Path, recorded: Batch, form: str
) -> None:
    settings = {"max_grad_norm": 0.0, **FORMS[form]}
    batch = stale(prepare(tiny_model, recorded, **settings))
    learner = make_learner(tiny_model, **settings)
    frozen = learner.policy.snapshot()
    found: list[tuple[float, dict[str, Tensor]]] = []
    splits: tuple[tuple[int, LayoutKind], ...] = ((10_000, "shared"), (1, "shared"), (30, "packed"), (40, "rows"))
    for budget, layout in splits:
        learner.policy.load_masters(frozen)
        learner.config, learner.layout = learner.config.model_copy(update={"token_budget": budget}), layout
        loss = learner.train(batch).metrics["train/loss"]
        found.append((loss, gradients_of(learner)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        assert_close(gradient, found[0][1])


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_m2po_keeps_the_second_moment_of_a_batch_at_its_threshold(
    tiny_model: Path, recorded: Batch, mini_batches: int
) -> None:
    settings = {"loss_type": "m2po", "m2_threshold": 0.05, "mini_batches": mini_batches, "lr": 0.0}
    batch = stale(prepare(tiny_model, recorded, **settings))
    metrics = make_learner(tiny_model, **settings).train(batch).metrics
    assert metrics["grpo/second_moment"] > 0.2
    assert 0.03 < metrics["grpo/second_moment_kept"] <= 0.05
    assert 0.05 < metrics["grpo/clipped_fraction"] < 0.6
    fresh = make_learner(tiny_model, **settings).train(prepare(tiny_model, recorded, **settings)).metrics
    assert fresh["grpo/clipped_fraction"] == 0.0


def test_m2po_judges_a_token_by_its_advantage_with_the_teachers_opinion(tiny_model: Path) -> None:
    """The teacher alone says which tokens move away from the sampler if rewards say nothing."""
    settings = {"loss_type": "m2po", "m2_threshold": 0.05, "distill": "reverse_kl", "lr": 0.0}
    batch = stale(prepare(tiny_model, with_teacher(sample(tiny_model), 5), **settings))
    metrics = make_learner(tiny_model, **settings).train(batch).metrics
    assert metrics["grpo/second_moment"] > 0.2
    assert 0.03 < metrics["grpo/second_moment_kept"] <= 0.05


def test_identity_1_a_constant_added_to_all_rewards_changes_no_gradient(tiny_model: Path) -> None:
    """Group-relative advantages do not change if c is added to each reward; without a baseline they do."""
    plain, shifted = (sample(tiny_model, reward=lambda answer, by=by: parity(answer) + by) for by in (0.0, 1.0))
    for settings, same in (({}, True), ({"advantage_norm": "none"}, True), ({"loss_type": "no_baseline"}, False)):
        left, right = (
            gradients(make_learner(tiny_model, max_grad_norm=0.0, **settings), prepare(tiny_model, batch, **settings))
            for batch in (plain, shifted)
        )
        assert all(torch.allclose(left[name], right[name], atol=1e-7) for name in left) is same


def test_identity_2_leave_one_out_is_the_centred_reward_by_a_constant_factor(tiny_model: Path, recorded: Batch) -> None:
    """RLOO's gradient is that of mean-centred rewards without std, times G / (G - 1); so gradients are compared."""
    settings = {"advantage_norm": "none", "max_grad_norm": 0.0}
    batch = recorded
    left_out = Batch(number=1, run_id="r", groups=[with_leave_one_out(group) for group in batch.groups])
    centred = gradients(make_learner(tiny_model, **settings), prepare(tiny_model, batch, **settings))
    rloo = gradients(make_learner(tiny_model, **settings), prepare(tiny_model, left_out, **settings))
    assert_close({name: value * 4 / 3 for name, value in centred.items()}, rloo)


def with_leave_one_out(group: Group) -> Group:
    others = [(sum(group.scores) - score) / (len(group.scores) - 1) for score in group.scores]
    own = [[score - other] for score, other in zip(group.scores, others, strict=True)]
    return Group(
        tokens=group.tokens,
        masks=group.masks,
        scores=group.scores,
        inference_logprobs=group.inference_logprobs,
        advantages=own,
    )


def test_identity_3_fresh_gspo_is_grpo_with_sequence_means(tiny_model: Path, recorded: Batch) -> None:
    """On policy and with one update, the sequence's ratio is 1 as every token's is."""
    batch = prepare(tiny_model, recorded)
    gspo, grpo = (
        gradients(make_learner(tiny_model, max_grad_norm=0.0, loss_type=name, loss_aggregation="sequence"), batch)
        for name in ("gspo", "grpo")
    )
    assert_close(gspo, grpo)


def test_identity_4_without_staleness_clip_truncation_and_no_correction_are_one(
    tiny_model: Path, recorded: Batch
) -> None:
    """At ratio 1 nothing is clipped or cut; with stale rollouts the three differ."""
    batch = prepare(tiny_model, recorded)
    forms = ({}, {"importance_sampling": "truncated"}, {"loss_type": "reinforce_with_baseline"})
    clip, truncated, uncorrected = (gradients(make_learner(tiny_model, **form), batch) for form in forms)
    assert_close(clip, truncated, 1e-5)
    assert_close(clip, uncorrected, 1e-5)
    old = [gradients(make_learner(tiny_model, **form), stale(batch)) for form in forms]
    for left, right in ((0, 1), (1, 2), (0, 2)):
        assert any(not torch.allclose(old[left][name], old[right][name], atol=1e-4) for name in clip)


def test_the_divergence_is_zero_at_the_start_and_grows_as_the_policy_leaves_it(
    tiny_model: Path, recorded: Batch
) -> None:
    learner = make_learner(tiny_model, lr=1e-2, kl_coef=0.1, epochs_per_batch=1)
    batch = prepare(tiny_model, recorded)
    found = [learner.train(batch).metrics for _ in range(4)]
    assert found[0]["train/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert found[3]["train/kl_reference"] > 1e-3
    assert found[3]["train/loss"] == pytest.approx(found[3]["train/loss_policy"] + found[3]["train/loss_kl"], rel=1e-4)


def test_a_strong_divergence_holds_the_policy_at_its_reference(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    free, held = (make_learner(tiny_model, lr=3e-3, kl_coef=coefficient) for coefficient in (1e-9, 10.0))
    for learner in (free, held):
        for _ in range(8):
            learner.train(batch)
    assert held.train(batch).metrics["train/kl_reference"] < free.train(batch).metrics["train/kl_reference"] / 5


def test_the_reference_is_the_policy_at_the_start_until_it_is_swapped(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    learner = make_learner(tiny_model, lr=1e-2, kl_coef=0.1, ref_update_interval=3)
    divergences = []
    for number in range(1, 6):
        divergences.append(learner.train(replace(batch, number=number)).metrics["train/kl_reference"])
    assert divergences[2] > 1e-4
    assert divergences[3] == pytest.approx(0.0, abs=1e-6)  # after batch 3 the policy became the reference
    assert divergences[4] > 1e-6


def test_another_checkpoint_can_be_the_reference(tiny_model: Path, recorded: Batch, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=7)
    batch = prepare(tiny_model, recorded)
    learner = make_learner(tiny_model, kl_coef=0.1, ref_model=str(other))
    learner.train(batch)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    with learner.policy.with_weights(make_learner(other).policy.snapshot()):
        expected = learner.score(batch.rows, batch.targets)
    assert prepared.reference_logprobs is not None
    torch.testing.assert_close(prepared.reference_logprobs, expected)


def test_a_reference_of_another_architecture_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    narrower = make_tiny_model(tmp_path / "narrower", vocabulary=48)
    deeper = make_tiny_model(tmp_path / "deeper", layers=3)
    rotated = make_tiny_model(tmp_path / "rotated")
    config = json.loads((rotated / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 100
    (rotated / "config.json").write_text(json.dumps(config))
    for other, cause in ((narrower, "no model.embed_tokens"), (deeper, "has model.layers.2"), (rotated, "rope_theta")):
        with pytest.raises(ModelNotFound, match=f"{cause}.*needs the policy's architecture"):
            make_learner(tiny_model, kl_coef=0.1, ref_model=str(other))
    with pytest.raises(ModelNotFound, match="no such directory"):
        make_learner(tiny_model, kl_coef=0.1, ref_model="./not-here")


def test_reference_logprobs_of_the_environment_win_over_those_scored_here(tiny_model: Path) -> None:
    raw = sample(tiny_model)
    supplied = [[-3.0] * len(tokens) for tokens in raw.groups[0].tokens]
    raw.groups[0].ref_logprobs = supplied
    learner = make_learner(tiny_model, kl_coef=0.1)
    batch = prepare(tiny_model, raw)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score).reference_logprobs
    assert prepared is not None
    first = [row for row in batch.rows if row.group == batch.rows[0].group]
    count = sum(len(row.targets) for row in first)
    assert prepared[:count].tolist() == [-3.0] * count
    torch.testing.assert_close(prepared[count:], batch.targets.rollout_logprobs[count:], atol=1e-5, rtol=0)


def test_the_coefficient_follows_the_target_from_batch_to_batch_and_is_said(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    learner = make_learner(tiny_model, lr=1e-2, kl_coef=0.1, target_kl=1e-6, kl_adapt_rate=1.0)
    said = [learner.train(batch).metrics["train/kl_coef"] for _ in range(3)]
    assert said == pytest.approx([0.1, 0.08, 0.096])  # no divergence at first, then far above the target


def test_a_resumed_objective_goes_on_where_it_was(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    settings = {"lr": 1e-2, "kl_coef": 0.1, "target_kl": 1e-6, "ref_update_interval": 2}
    learner, resumed = (make_learner(tiny_model, **settings) for _ in range(2))
    for number in (1, 2, 3):
        learner.train(replace(batch, number=number))
    resumed.objective.load_state(learner.objective.state())
    resumed.policy.load_masters(weights_of(learner))
    resumed.optimizer.load_state_dict(learner.optimizer.state_dict())
    left, right = (each.train(replace(batch, number=4)).metrics for each in (learner, resumed))
    assert left == right
    assert left["train/kl_coef"] != 0.1


def test_with_several_updates_old_logprobs_are_those_the_batch_began_with(tiny_model: Path, recorded: Batch) -> None:
    """The clip is relative to the weights before the first update, also if the sampler's logprobs differ much."""
    batch = stale(prepare(tiny_model, recorded))
    learner = make_learner(tiny_model, lr=1e-2, old_logprobs="recomputed", epochs_per_batch=2)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    before = learner.score(batch.rows, batch.targets)
    assert prepared.proximal_logprobs is not None
    torch.testing.assert_close(prepared.proximal_logprobs, before)
    assert (
        make_learner(tiny_model, old_logprobs="recomputed")
        .objective.prepare(batch.rows, batch.targets, learner.score)
        .proximal_logprobs
        is None
    )


def test_with_one_update_recomputing_costs_no_forward_and_equals_scoring(tiny_model: Path, recorded: Batch) -> None:
    batch = stale(prepare(tiny_model, recorded))
    settings = {"old_logprobs": "recomputed", "mismatch_correction": "token_truncate", "max_grad_norm": 0.0}
    learner, scored = (make_learner(tiny_model, **settings) for _ in range(2))
    known = replace(batch, targets=replace(batch.targets, proximal_logprobs=scored.score(batch.rows, batch.targets)))
    assert_close(gradients(learner, batch), gradients(scored, known), 2e-6)


def with_teacher(raw: Batch, token: int) -> Batch:
    """Add a teacher that prefers one token to a second at every position."""
    for group in raw.groups:
        group.scores = [1.0] * len(group.scores)
        group.distill_token_ids = [[[token, token + 1]] * len(row) for row in group.tokens]
        group.distill_logprobs = [[[-0.01, -5.0]] * len(row) for row in group.tokens]
    return raw


def test_a_teacher_is_learnt_from_where_rewards_say_nothing(tiny_model: Path) -> None:
    settings = {"distill": "forward_kl", "lr": 1e-2}
    batch = prepare(tiny_model, with_teacher(sample(tiny_model), 5), **settings)
    learner = make_learner(tiny_model, **settings)
    losses = [learner.train(batch).metrics["train/loss_distill"] for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_loss_term_that_the_first_mini_batch_lacks_is_reported(tiny_model: Path) -> None:
    """Over several ranks the one whose rows have a teacher may have no row in the first mini-batch."""
    settings = {"distill": "forward_kl", "mini_batches": 2}
    batch = prepare(tiny_model, with_teacher(sample(tiny_model), 5), **settings)
    learner = make_learner(tiny_model, **settings)
    training = learner.begin(batch)
    for mini_batch in training.mini_batches:
        learner.apply(learner.accumulate(training, mini_batch))
    del training.done[0].totals["distill"]
    reported = learner.finish(training).metrics["train/loss_distill"]
    assert reported == pytest.approx(training.done[1].totals["distill"] / 2)


def test_a_teachers_opinion_of_sampled_tokens_is_added_to_their_advantages(tiny_model: Path) -> None:
    raw = sample(tiny_model)
    for group in raw.groups:
        group.scores = [0.0] * len(group.scores)
        group.distill_token_ids = [[[token] for token in row] for row in group.tokens]
        group.distill_logprobs = [[[-1.0]] * len(row) for row in group.tokens]
    settings = {"distill": "reverse_kl", "distill_coef": 0.5}
    learner, batch = make_learner(tiny_model, **settings), prepare(tiny_model, raw, **settings)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    torch.testing.assert_close(prepared.advantages, 0.5 * (-1.0 - batch.targets.rollout_logprobs))


@pytest.mark.parametrize("form", ["forward_kl", "reverse_kl"])
def test_a_teacher_is_compared_at_the_temperature_of_the_rollouts_unless_another_is_set(
    tiny_model: Path, form: str
) -> None:
    raw = with_teacher(sample(tiny_model), 5)
    for group in raw.groups:
        group.generation_params = {"temperature": 0.5}
    found = []
    for more in ({}, {"distill_temperature": 0.5}, {"distill_temperature": 1.0}):
        settings = {"distill": form, "max_grad_norm": 0.0, **more}
        learner, batch = make_learner(tiny_model, **settings), prepare(tiny_model, raw, **settings)
        found.append(gradients(learner, batch))
    assert_close(found[0], found[1], 1e-9)
    assert any(not torch.allclose(found[0][name], found[2][name]) for name in found[0])


def test_the_entropy_bonus_raises_the_entropy(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    plain, curious = (make_learner(tiny_model, lr=3e-3, entropy_coef=coefficient) for coefficient in (0.0, 1.0))
    for _ in range(5):
        plain.train(batch)
        curious.train(batch)
    entropies = [each.train(batch).metrics["train/entropy"] for each in (plain, curious)]
    assert entropies[1] > entropies[0] + 0.05


def test_under_an_adapter_the_reference_is_the_base_with_the_adapter_off(tiny_model: Path, recorded: Batch) -> None:
    from example_trainer.modeling.lora import AdapterOptions

    options = PolicyOptions(
        model_name=str(tiny_model), dtype="float32", device="cpu", adapter=AdapterOptions(r=4, dropout=0.0)
    )
    policy = load_policy(options)
    reference = Reference(policy)
    assert reference.weights is None
    learner = make_learner(tiny_model)
    choose_layout(policy)
    batch = prepare(tiny_model, recorded)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.3)
    base = learner.score(batch.rows, batch.targets)
    learner.policy = policy
    assert not torch.allclose(learner.score(batch.rows, batch.targets), base, atol=1e-3)
    torch.testing.assert_close(reference.logprobs(batch.rows, batch.targets, learner.score), base)


def test_a_run_that_distils_without_a_teacher_says_so_once(
    tiny_model: Path, recorded: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(tiny_model, distill="forward_kl")
    batch = prepare(tiny_model, recorded, distill="forward_kl")
    learner.train(batch)
    learner.train(batch)
    assert sum("no distill_token_ids" in record.message for record in caplog.records) == 1


def test_a_teacher_that_names_one_token_a_position_is_warned_about_under_forward_kl(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = sample(tiny_model)
    for group in raw.groups:
        group.distill_token_ids = [[[token] for token in row] for row in group.tokens]
        group.distill_logprobs = [[[-9.0]] * len(row) for row in group.tokens]
    learner = make_learner(tiny_model, distill="forward_kl")
    batch = prepare(tiny_model, raw, distill="forward_kl")
    metrics = [learner.train(batch).metrics for _ in range(2)]
    assert [each["train/loss_distill"] for each in metrics] == [0.0, 0.0]
    assert sum("--env.teacher_top_k 8" in record.message for record in caplog.records) == 1


def test_a_reference_that_differs_in_frozen_layers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Only trained layers are exchanged for the reference's, so the rest has to be the same."""
    options = PolicyOptions(model_name=str(tiny_model), dtype="float32", device="cpu", train_layer_indices="0")
    policy = load_policy(options)
    other = make_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(ModelNotFound, match="which --train-layer-indices freezes"):
        Reference(policy, model_name=str(other))
    assert Reference(policy, model_name=str(tiny_model)).weights is not None


def test_a_reference_that_cannot_be_loaded_is_named_by_its_own_option(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    policy = load_policy(PolicyOptions(model_name=str(tiny_model), dtype="float32", device="cpu"))
    with pytest.raises(ModelNotFound, match=r"^--ref-model "):
        Reference(policy, model_name=str(tmp_path))
