"""Several ranks on a CPU: the same loss, gradients, metrics, weights and checkpoints as one process, to rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atropos_api.wire import Batch, Group
from example_trainer.checkpointing import TrainerState, random_state, restore, save_checkpoint
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings, prepare_batch
from example_trainer.errors import RanksFailed
from example_trainer.learning.adapters import AdapterOptions
from example_trainer.learning.distributed import Ranks, joined_ranks
from example_trainer.learning.layout import choose_layout
from example_trainer.learning.objective import make_objective
from example_trainer.learning.sharding import WholeState, whole
from example_trainer.model import PolicyOptions, Sharding, load_policy
from example_trainer.running.optimizers import make_optimizer, optimizer_settings
from example_trainer.testing import Sampler
from example_trainer.training import Learner, learner_settings

from .ranks import run_ranks

TOLERANCE = 1e-6
ONE = Ranks()
# A large epsilon keeps Adam from turning rounding near a zero gradient into steps of full size.
SETTINGS: dict[str, Any] = {"dtype": "float32", "optimizer": "adamw", "lr": 1e-2, "adam_eps": 1e-2, "seq_len": 64}


def make_learner(model: Path, ranks: Ranks, options: PolicyOptions, settings: dict[str, Any]) -> Learner:
    config = TrainingConfig.model_validate({"model_name": str(model), "token_budget": 40, **SETTINGS, **settings})
    torch.manual_seed(0)
    spread = options.adapter is None and ranks.world_size > 1
    policy = load_policy(replace(options, model_name=str(model), sharding=Sharding() if spread else None))
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    objective, layout = make_objective(config, policy), choose_layout(policy)
    return Learner(policy, optimizer, learner_settings(config), objective=objective, layout=layout, ranks=ranks)


def share(groups: list[Group], ranks: Ranks) -> Batch:
    return Batch(number=1, run_id="r", groups=groups[ranks.rank :: ranks.world_size])


def train(
    ranks: Ranks, model: Path, groups: list[Group], options: PolicyOptions, settings: dict[str, Any]
) -> dict[str, Any]:
    """Metrics, and gradients and weights as they are after a batch, whole."""
    learner = make_learner(model, ranks, options, settings)
    batch = prepare_batch(share(groups, ranks), data_settings(TrainingConfig(model_name=str(model))))
    result = learner.train(batch)
    masters = learner.policy.masters.items()
    return {
        "metrics": result.metrics,
        "gradients": whole({name: master.grad for name, master in masters}, keep=True),
        "weights": whole({name: master.detach() for name, master in masters}, keep=True),
    }


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Group]:
    """Three of them: with four ranks one has nothing."""
    weights = load_policy(PolicyOptions(model_name=str(tiny_model), dtype="float32", device="cpu")).snapshot()
    sampler = Sampler(tiny_model, seed=3)
    return [sampler.sample(weights, 1, lambda a: float(sum(a) % 3), group_size=size) for size in (6, 3, 4)]


CPU = PolicyOptions(model_name="", dtype="float32", device="cpu")
CASES: dict[str, tuple[int, PolicyOptions, dict[str, Any]]] = {
    "two ranks": (2, CPU, {}),
    "a rank with nothing": (4, CPU, {"loss_aggregation": "sequence"}),
    "steps of whole groups, twice over": (2, CPU, {"mini_batches": 2, "epochs_per_batch": 2}),
    "activation checkpointing": (2, replace(CPU, gradient_checkpointing=True), {"loss_aggregation": "constant"}),
    "a frozen layer": (2, replace(CPU, train_layer_indices="1"), {}),
    "a reference policy": (2, CPU, {"kl_coef": 0.1, "epochs_per_batch": 2}),
    "an adapter": (2, replace(CPU, adapter=AdapterOptions(r=4, alpha=8)), {"weight_bridge_mode": "lora_only"}),
}


@pytest.mark.parametrize("case", CASES)
def test_p2_ranks_give_the_loss_gradients_metrics_and_weights_of_one_process(
    case: str, tiny_model: Path, groups: list[Group], tmp_path: Path
) -> None:
    world_size, options, settings = CASES[case]
    expected = train(ONE, tiny_model, groups, options, settings)
    for found in run_ranks(world_size, tmp_path / "meeting", train, tiny_model, groups, options, settings):
        for name in found["metrics"].keys() - {"perf/forward_tokens"}:
            assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5, abs=TOLERANCE), name
        for kind in ("gradients", "weights"):
            assert found[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                np.testing.assert_allclose(found[kind][name], tensor.numpy(), rtol=0, atol=TOLERANCE, err_msg=name)


def save(ranks: Ranks, model: Path, groups: list[Group], root: Path) -> None:
    learner = make_learner(model, ranks, CPU, {})
    config = TrainingConfig(model_name=str(model))
    learner.train(prepare_batch(share(groups, ranks), data_settings(config)))
    state = TrainerState(
        step=1, updates=1, policy_version=1, highest_version=1, run_id="r", run_name="n", seed=0, config={}
    )
    optimizer = WholeState(learner.optimizer) if learner.policy.is_sharded else learner.optimizer
    with learner.policy.gathered():
        ranks.lead(lambda: save_checkpoint(root, state, learner.policy, optimizer, random_state()))


def resume(ranks: Ranks, model: Path, groups: list[Group], root: Path) -> dict[str, Any]:
    """The weights after a second batch, from the checkpoint of the first."""
    learner = make_learner(model, ranks, CPU, {})
    restore(root / "checkpoint-1", learner.policy, learner.optimizer)
    learner.train(prepare_batch(share(groups, ranks), data_settings(TrainingConfig(model_name=str(model)))))
    weights: dict[str, Any] = whole({n: m.detach() for n, m in learner.policy.masters.items()}, keep=True)
    return weights


def test_a_checkpoint_is_whole_and_any_number_of_ranks_goes_on_from_it(
    tiny_model: Path, groups: list[Group], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    alone, together = tmp_path / "alone", tmp_path / "together"
    save(ONE, tiny_model, groups, alone)
    run_ranks(2, tmp_path / "saving", save, tiny_model, groups, together)
    models = [AutoModelForCausalLM.from_pretrained(root / "latest") for root in (alone, together)]
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=TOLERANCE)
    expected = resume(ONE, tiny_model, groups, alone)
    two, _ = run_ranks(2, tmp_path / "resuming", resume, tiny_model, groups, alone)
    one = resume(ONE, tiny_model, groups, together)
    for name, tensor in expected.items():
        np.testing.assert_allclose(two[name], tensor.numpy(), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(one[name].numpy(), tensor.numpy(), rtol=0, atol=TOLERANCE)


def agree(ranks: Ranks) -> dict[str, Any]:
    def fail() -> None:
        raise ValueError("no broker")

    with pytest.raises((ValueError, RanksFailed), match="no broker"):
        ranks.lead(fail)
    return {
        "led": ranks.lead(lambda: f"from {ranks.rank}"),
        "gathered": ranks.gather(ranks.rank),
        "most": ranks.most(ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
    }


def test_ranks_agree_and_learn_what_rank_0_alone_may_do(tmp_path: Path) -> None:
    expected = {"led": "from 0", "gathered": [0, 1], "most": 1, "any": [True, False]}
    assert run_ranks(2, tmp_path / "meeting", agree) == [expected] * 2
    alone = {"led": "from 0", "gathered": [0], "most": 0, "any": [False, False]}
    assert agree(ONE) == alone


def test_ranks_without_a_place_to_meet_are_told_which_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(RanksFailed, match="--init-method tcp://"),
        joined_ranks(0, 2, "env://", device="cpu", timeout_seconds=1.0),
    ):
        pass


def score_under(ranks: Ranks, model: Path, groups: list[Group]) -> list[torch.Tensor]:
    """Logprobs under the policy, under other weights, and under the policy again."""
    learner = make_learner(model, ranks, CPU, {})
    batch = prepare_batch(share(groups, ranks), data_settings(TrainingConfig(model_name=str(model))))
    other = {name: weight * 1.5 for name, weight in learner.policy.snapshot().items()}
    first = learner.score(batch.rows, batch.targets)
    with learner.policy.with_weights(other):
        second = learner.score(batch.rows, batch.targets)
    return [first, second, learner.score(batch.rows, batch.targets)]


def test_other_weights_are_scored_under_and_leave_no_trace(
    tiny_model: Path, groups: list[Group], tmp_path: Path
) -> None:
    alone = score_under(ONE, tiny_model, groups)
    assert (alone[0] - alone[1]).abs().max() > 1e-2
    shares = run_ranks(2, tmp_path / "meeting", score_under, tiny_model, groups)
    for number, values in enumerate(alone):
        found = np.sort(np.concatenate([own[number] for own in shares]))
        np.testing.assert_allclose(found, np.sort(values.numpy()), rtol=0, atol=1e-5)
