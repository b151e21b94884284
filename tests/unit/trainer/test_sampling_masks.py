"""Sampling masks in training: logprobs over the tokens that a draw could choose from, and exact ratios of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atropos_api.wire import Batch, Group
from example_trainer.data import TrainingBatch
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.objective.losses import Targets
from example_trainer.objective.sampling_masks import labels_with_masks, over_masks
from example_trainer.step.logprob_mismatch import Alignment

from .test_objective_in_training import assert_close, gradients, prepare, sample
from .test_training import make_learner

KEPT = 6
TEMPERATURE = 0.7


def top_k_batch(model: Path, *, masks: bool = True) -> Batch:
    """Rollouts in which each sampled token is one of the six most likely, with its logprob over these.

    Every fourth sampled token has no mask: as the server sends it where too many tokens could be drawn.
    """
    policy = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
    batch = sample(model)
    generator = torch.Generator().manual_seed(2)
    for group in batch.groups:
        group.sampling_masks = []
        group.generation_params = {"temperature": TEMPERATURE, "top_k": KEPT, "truncated_sampling": True}
        for row, mask in enumerate(group.masks):
            _draw_again(policy.module, group, row, [at for at, label in enumerate(mask) if label != -100], generator)
        if not masks:
            group.sampling_masks = None
    return batch


def _draw_again(module: Any, group: Group, row: int, places: list[int], generator: torch.Generator) -> None:
    assert group.inference_logprobs is not None
    assert group.sampling_masks is not None
    kept: list[list[int]] = [[] for _ in group.tokens[row]]
    for number, at in enumerate(places):
        with torch.no_grad():
            logits = module(torch.tensor([group.tokens[row][:at]])).logits[0, -1].float() / TEMPERATURE
        best = logits.topk(KEPT)
        logs = best.values.log_softmax(0)
        drawn = int(torch.multinomial(logs.exp(), 1, generator=generator))
        token = int(best.indices[drawn])
        group.tokens[row][at] = group.masks[row][at] = token
        group.inference_logprobs[row][at] = float(logs[drawn])
        if number % 4 != 3:
            kept[at] = best.indices.tolist()
    group.sampling_masks.append(kept)


@pytest.fixture(scope="module")
def recorded(tiny_model: Path) -> Batch:
    return top_k_batch(tiny_model)


def known(batch: TrainingBatch) -> Tensor:
    assert batch.targets.mask_bounds is not None
    return batch.targets.mask_bounds.diff() > 0


def test_the_trainer_computes_the_samplers_logprobs_over_the_masks(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded)
    learner = make_learner(tiny_model)
    difference = learner.score(batch.rows, batch.targets) - batch.targets.rollout_logprobs
    assert difference[known(batch)].abs().max() < 2e-5
    assert difference[~known(batch)].abs().mean() > 0.1, "the distribution of these is not known"


@pytest.mark.parametrize("in_the_step", [True, False])
def test_tokens_whose_distribution_is_not_known_are_no_evidence_against_the_weights(
    tiny_model: Path, recorded: Batch, in_the_step: bool
) -> None:
    batch = prepare(tiny_model, recorded)
    batch = replace(batch, targets=replace(batch.targets, versions=torch.ones_like(batch.targets.versions)))
    learner = make_learner(tiny_model)
    alignment = Alignment(learner, keep=1, sample_sequences=len(batch.rows), seed=0)
    alignment.published(1)
    if not in_the_step:
        alignment.moved()
    older = alignment.score_older(batch)
    metrics = alignment.measure(learner.train(batch), older)
    assert metrics["alignment/tokens"] == int(known(batch).sum())
    assert metrics["alignment/diff_max"] < 2e-5


def plain_loss(learner: Any, batch: TrainingBatch) -> Tensor:
    """GRPO's loss at ratio 1, token by token through the whole model, in the form of its definition."""
    targets, terms = batch.targets, []
    assert targets.mask_ids is not None
    assert targets.mask_bounds is not None
    masks = targets.mask_ids.tensor_split(targets.mask_bounds[1:-1])
    for row in batch.rows:
        logits = learner.policy.module(torch.from_numpy(np.asarray(row.tokens))[None]).logits[0].float() / TEMPERATURE
        for number, at in enumerate(row.targets.tolist()):
            place = row.first_target + number
            allowed = masks[place]
            over = logits[at - 1][allowed] if len(allowed) else logits[at - 1]
            logprob = logits[at - 1][targets.labels[place]] - over.logsumexp(0)
            ratio = (logprob - logprob.detach()).exp() if len(allowed) else None
            weight = (logprob.detach() - targets.rollout_logprobs[place]).exp().clamp(max=2.0)
            terms.append(targets.advantages[place] * (ratio if ratio is not None else weight * logprob))
    return -torch.stack(terms).mean()


def test_the_gradient_is_that_of_the_truncated_distribution(tiny_model: Path, recorded: Batch) -> None:
    settings = {"loss_aggregation": "token", "max_grad_norm": 0.0}
    batch = prepare(tiny_model, recorded, **settings)
    learner, plain = (make_learner(tiny_model, **settings) for _ in range(2))
    found = gradients(learner, batch)
    parameters = dict(plain.policy.module.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    plain_loss(plain, batch).backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-4, atol=1e-6)


def test_a_mask_of_one_token_leaves_nothing_to_learn(tiny_model: Path, recorded: Batch) -> None:
    batch = prepare(tiny_model, recorded, max_grad_norm=0.0)
    targets = replace(
        batch.targets,
        mask_ids=batch.targets.labels,
        mask_bounds=torch.arange(len(batch.targets) + 1),
        rollout_logprobs=torch.zeros(len(batch.targets)),
        truncated_sampling=None,
    )
    found = gradients(make_learner(tiny_model, max_grad_norm=0.0), replace(batch, targets=targets))
    assert max(float(gradient.abs().max()) for gradient in found.values()) < 1e-7


def test_without_any_mask_nothing_changes(tiny_model: Path) -> None:
    batch = prepare(tiny_model, sample(tiny_model), max_grad_norm=0.0)
    nowhere = torch.zeros(len(batch.targets) + 1, dtype=torch.long)
    learners = [make_learner(tiny_model, max_grad_norm=0.0) for _ in range(2)]
    masked = replace(batch, targets=replace(batch.targets, mask_ids=torch.tensor([3]), mask_bounds=nowhere))
    assert_close(gradients(learners[0], batch), gradients(learners[1], masked), 1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {"old_logprobs": "recomputed", "mismatch_correction": "token_mask", "epochs_per_batch": 2},
        {"kl_coef": 0.1},
        {"loss_type": "m2po"},
        {"loss_type": "gspo"},
        {"importance_sampling": "truncated"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_logprob_of_a_step_is_over_the_same_tokens(
    tiny_model: Path, recorded: Batch, settings: dict[str, Any]
) -> None:
    """Before the first update policy, reference and sampler agree where the masks are known."""
    batch = prepare(tiny_model, recorded, **settings)
    learner = make_learner(tiny_model, **settings)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    for values in (prepared.proximal_logprobs, prepared.reference_logprobs):
        if values is not None:
            torch.testing.assert_close(
                values[known(batch)], batch.targets.rollout_logprobs[known(batch)], rtol=0, atol=2e-5
            )
    metrics = learner.train(batch).metrics
    assert metrics["train/kl_reference" if "kl_coef" in settings else "train/skipped"] < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "gspo", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
        {"loss_type": "gmpo", "clip_eps": 0.05, "clip_eps_high": 0.05},
        {"loss_type": "vespo"},
        {"loss_type": "m2po", "m2_threshold": 1e-6},
    ],
    ids=lambda settings: settings["loss_type"],
)
def test_a_token_without_its_mask_does_not_clip_or_scale_the_tokens_that_have_theirs(
    tiny_model: Path, recorded: Batch, settings: dict[str, Any]
) -> None:
    """Its ratio is wrong by the mass that was cut away, which would silence its whole sequence in gspo."""
    settings = {**settings, "max_grad_norm": 0.0}
    batch = prepare(tiny_model, recorded, **settings)
    learner = make_learner(tiny_model, **settings)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    logprobs = learner.score(batch.rows, batch.targets).requires_grad_(True)
    at = torch.arange(len(batch.targets))
    terms = learner.objective.terms(prepared, at, logprobs, None, torch.ones(len(at)))
    terms["policy"].sum().backward()
    assert logprobs.grad is not None
    sharp = known(batch) & (prepared.advantages != 0)
    alone = (batch.targets.sequences[:, None] == batch.targets.sequences[~known(batch)]).any(1)
    assert (sharp & alone).any()
    for tokens in (sharp & ~alone, sharp & alone):
        if tokens.any():
            ratios = -logprobs.grad[tokens] / prepared.advantages[tokens]
            torch.testing.assert_close(ratios, torch.ones(len(ratios)), rtol=0, atol=2e-3)


def test_a_teachers_tokens_stand_beside_the_masks(tiny_model: Path) -> None:
    raw = top_k_batch(tiny_model)
    for group in raw.groups:
        group.distill_token_ids = [[[5, 6]] * len(row) for row in group.tokens]
        group.distill_logprobs = [[[-0.01, -5.0]] * len(row) for row in group.tokens]
    settings = {"distill": "forward_kl", "max_grad_norm": 0.0}
    with_masks = make_learner(tiny_model, **settings).train(prepare(tiny_model, raw, **settings)).metrics
    for group in raw.groups:
        group.sampling_masks = None
    without = make_learner(tiny_model, **settings).train(prepare(tiny_model, raw, **settings)).metrics
    assert with_masks["train/loss_distill"] == pytest.approx(without["train/loss_distill"], rel=1e-5)
    assert with_masks["train/loss_policy"] != pytest.approx(without["train/loss_policy"], rel=1e-3)


def test_logprobs_over_a_mask_have_finite_gradients_at_any_row() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -2.0], [-3.0, -9.0, -9.0], [-0.5, -0.5, -0.7]], requires_grad=True)
    targets = Targets(
        labels=torch.tensor([4, 5, 6]),
        rollout_logprobs=torch.zeros(3),
        advantages=torch.zeros(3),
        temperatures=torch.ones(3),
        sequences=torch.zeros(3, dtype=torch.long),
        versions=torch.zeros(3, dtype=torch.long),
        version_bounds=torch.zeros(3, dtype=torch.long),
        mask_ids=torch.tensor([4, 5, 6]),
        mask_bounds=torch.tensor([0, 2, 2, 3]),
    )
    at = torch.arange(3)
    labels = labels_with_masks(targets, at)
    assert labels[:, 0].tolist() == [4, 5, 6]
    assert (labels[0, 1:].tolist(), labels[2, 1].item()) == ([4, 5], 6)
    assert labels_with_masks(targets, at[1:2]).tolist() == [5], "no mask there, so no further column"
    found = over_masks(logprobs, targets, at)
    found.sum().backward()
    torch.testing.assert_close(found.detach()[1:], torch.tensor([-3.0, 0.0]))
    assert float(found.detach()[0]) == pytest.approx(-1.0 - float(torch.tensor([-1.0, -2.0]).logsumexp(0)))
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[1].tolist() == [1.0, 0.0, 0.0]
