"""Several ranks on a CPU give one process's loss, gradients, metrics, weights and checkpoints, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from atropos_api.wire import Batch, Group
from example_trainer.checkpointing import restore, save_checkpoint
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings, prepare_batch
from example_trainer.distributed.ranks import Ranks, joined_ranks
from example_trainer.errors import RanksFailed
from example_trainer.model import load_policy
from example_trainer.modeling import fsdp
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions, Sharding, load_module, policy_options
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.modeling.shards import WholeState, whole
from example_trainer.objective.objective import make_objective
from example_trainer.state import TrainerState, random_state
from example_trainer.step.logprob_mismatch import Alignment
from example_trainer.testing import Sampler, make_tiny_model
from example_trainer.training import Learner

from .ranks import run_ranks

TOLERANCE = 1e-6
ONE = Ranks()
CPU = PolicyOptions(model_name="", dtype="float32", device="cpu")
# A large epsilon keeps Adam from turning rounding near a zero gradient into steps of full size.
SETTINGS: dict[str, Any] = {"dtype": "float32", "optimizer": "adamw", "lr": 1e-2, "adam_eps": 1e-2, "seq_len": 64}


def make_config(model: Path, settings: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig.model_validate({"model_name": str(model), "token_budget": 40, **SETTINGS, **settings})


def make_learner(model: Path, ranks: Ranks, options: PolicyOptions, settings: dict[str, Any]) -> Learner:
    config = make_config(model, settings)
    torch.manual_seed(0)
    size = ranks.world_size // ranks.data.world_size
    spread = replace(options.sharding or Sharding(), tensor_parallel_size=size)
    spread = spread if options.adapter is None and ranks.world_size > 1 else None
    policy = load_policy(replace(options, model_name=str(model), sharding=spread))
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    objective, layout = make_objective(config, policy), choose_layout(policy)
    return Learner(policy, optimizer, config, objective=objective, layout=layout, ranks=ranks)


def share(groups: list[Group], ranks: Ranks) -> Batch:
    return Batch(number=1, run_id="r", groups=groups[ranks.data.rank :: ranks.data.world_size])


@dataclass(frozen=True)
class Case:
    """Batches that are trained on a number of ranks."""

    world_size: int = 2
    options: PolicyOptions = CPU
    settings: dict[str, Any] = field(default_factory=dict)
    batches: int = 1
    tied: bool = False
    tolerance: float = TOLERANCE


def train(ranks: Ranks, models: dict[bool, Path], groups: list[Group], case: Case) -> dict[str, Any]:
    """Train; return the metrics, and whole gradients and weights after the last batch."""
    model = models[case.tied]
    learner = make_learner(model, ranks, case.options, case.settings)
    settings = data_settings(make_config(model, case.settings))
    whole_batch = Batch(number=1, run_id="r", groups=groups)
    for number in range(case.batches):
        batch = prepare_batch(share(groups, ranks), settings, whole=whole_batch)
        result = learner.train(replace(batch, number=number + 1))
    masters = learner.policy.masters.items()
    return {
        "metrics": result.metrics,
        "gradients": whole({name: master.grad for name, master in masters}, keep=True),
        "weights": whole({name: master.detach() for name, master in masters}, keep=True),
    }


def train_all(
    ranks: Ranks, models: dict[bool, Path], groups: list[Group], cases: dict[str, Case]
) -> dict[str, dict[str, Any]]:
    return {name: train(ranks, models, groups, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Group]:
    """Return three groups, so that one of four ranks has none."""
    weights = load_policy(PolicyOptions(model_name=str(tiny_model), dtype="float32", device="cpu")).snapshot()
    sampler = Sampler(tiny_model, seed=3)
    return [sampler.sample(weights, 1, lambda a: float(sum(a) % 3), group_size=size) for size in (6, 3, 4)]


_ADAPTER = replace(CPU, adapter=AdapterOptions(r=4, alpha=8))
_LORA = {"weight_bridge_mode": "lora_only"}
CASES: dict[str, Case] = {
    "two ranks": Case(),
    "a rank with nothing": Case(world_size=4, settings={"loss_aggregation": "sequence"}),
    "steps of whole groups, twice over": Case(settings={"mini_batches": 2, "epochs_per_batch": 2}),
    "activation checkpointing": Case(
        options=replace(CPU, gradient_checkpointing=True, activation_offloading=True),
        settings={"loss_aggregation": "constant"},
    ),
    "a frozen layer": Case(options=replace(CPU, train_layer_indices="1")),
    "tied embeddings": Case(tied=True),
    "the std of the whole batch": Case(world_size=4, settings={"advantage_norm": "batch"}),
    "a mask by a moment over the batch": Case(settings={"loss_type": "m2po", "m2_threshold": 1e-3}, batches=3),
    "a reference policy": Case(settings={"kl_coef": 0.1, "epochs_per_batch": 2}),
    "a reference policy, layers gathered until the backward": Case(
        options=replace(CPU, sharding=Sharding(reshard_after_forward=False)),
        settings={"kl_coef": 0.1, "epochs_per_batch": 2, "ref_update_interval": 2},
        batches=3,
    ),
    "a reference that is swapped": Case(settings={"kl_coef": 0.1, "ref_update_interval": 1}, batches=3),
    "the default optimizer": Case(settings={"optimizer": "adamw_8bit"}, batches=2),
    "adafactor": Case(
        world_size=4, settings={"optimizer": "adafactor", "lr": 1e-4}, batches=2, tolerance=1e-4
    ),  # its step is the gradient over its own size, so the rounding of a small gradient is visible
    "masters in host memory": Case(options=replace(CPU, master_weights="host"), settings={"master_weights": "host"}),
    "masters in bf16": Case(
        options=replace(CPU, dtype="bfloat16", master_weights="none"),
        settings={"dtype": "bfloat16", "master_weights": "none"},
        tolerance=2e-2,
    ),
    "an adapter": Case(options=_ADAPTER, settings=_LORA),
    "an adapter, 8-bit states": Case(options=_ADAPTER, settings=_LORA | {"optimizer": "adamw_8bit"}, batches=2),
    "an adapter, adafactor": Case(
        options=_ADAPTER, settings=_LORA | {"optimizer": "adafactor", "lr": 1e-4}, batches=2, tolerance=1e-4
    ),
    "an adapter in host memory": Case(
        world_size=4,
        options=replace(_ADAPTER, master_weights="host"),
        settings=_LORA | {"master_weights": "host", "optimizer": "adamw_8bit"},
    ),
    "an adapter in bf16": Case(
        options=replace(_ADAPTER, dtype="bfloat16", master_weights="none"),
        settings=_LORA | {"dtype": "bfloat16", "master_weights": "none"},
        tolerance=2e-2,
    ),
    "compute in fp16": Case(options=replace(CPU, dtype="float16"), settings={"dtype": "float16"}, tolerance=4e-3),
    "an adapter in fp16": Case(
        options=replace(_ADAPTER, dtype="float16"), settings=_LORA | {"dtype": "float16"}, tolerance=4e-3
    ),
    "compute in bf16": Case(options=replace(CPU, dtype="bfloat16"), settings={"dtype": "bfloat16"}, tolerance=2e-2),
}


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, groups: list[Group], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The results by case: of one process, then of each rank."""
    directory = tmp_path_factory.mktemp("ranks")
    models = {False: tiny_model, True: make_tiny_model(directory / "tied", tied=True)}
    found = {name: [train(ONE, models, groups, case)] for name, case in CASES.items()}
    for size in (2, 4):
        cases = {name: case for name, case in CASES.items() if case.world_size == size}
        for results in run_ranks(size, directory / f"meeting-{size}", train_all, models, groups, cases):
            for name, result in results.items():
                found[name].append(result)
    return found


@pytest.mark.parametrize("case", CASES)
def test_p2_ranks_give_the_loss_gradients_metrics_and_weights_of_one_process(
    case: str, trained: dict[str, list[dict[str, Any]]]
) -> None:
    tolerance = CASES[case].tolerance
    expected, *ranks = trained[case]
    assert len(ranks) == CASES[case].world_size
    for found in ranks:
        for name in found["metrics"].keys() - {"perf/forward_tokens"}:
            assert found["metrics"][name] == pytest.approx(
                expected["metrics"][name], rel=10 * tolerance, abs=tolerance
            ), name
        for kind in ("gradients", "weights"):
            assert found[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                np.testing.assert_allclose(
                    found[kind][name], tensor.float().numpy(), rtol=0, atol=tolerance, err_msg=name
                )


def load_and_poison(ranks: Ranks, model: Path, groups: list[Group]) -> dict[str, Any]:
    """Load a model and train a step in which one rank's gradient is not finite; return what each rank did."""
    read: list[str] = []

    def reads(options: PolicyOptions, stored: Any, dtype: torch.dtype, device: torch.device) -> Any:
        read.append(device.type)
        return load_module(options, stored, dtype, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "load_module", reads)
        learner = make_learner(model, ranks, CPU, {})
    batch = prepare_batch(share(groups, ranks), data_settings(TrainingConfig(model_name=str(model))))
    before = learner.policy.snapshot()
    if ranks.rank == 1:
        advantages = batch.targets.advantages.clone()
        advantages[0] = torch.inf
        batch = replace(batch, targets=replace(batch.targets, advantages=advantages))
    result = learner.train(batch)
    still = [torch.equal(whole(before[name], keep=True), whole(weight, keep=True))
             for name, weight in learner.policy.snapshot().items()]  # fmt: skip
    return {
        "read": read,
        "updates": result.updates,
        "nonfinite": result.metrics["train/nonfinite"],
        "still": all(still),
    }


def test_rank_0_alone_reads_the_weights_and_a_gradient_that_one_rank_spoils_is_taken_by_none(
    tiny_model: Path, groups: list[Group], tmp_path: Path
) -> None:
    found = run_ranks(2, tmp_path / "meeting", load_and_poison, tiny_model, groups)
    assert [rank.pop("read") for rank in found] == [["meta", "cpu"], ["meta"]]
    assert found == [{"updates": 0, "nonfinite": 1.0, "still": True}] * 2


def overflow_on_one_rank(ranks: Ranks, model: Path, groups: list[Group], adapter: AdapterOptions | None) -> list[Any]:
    """Train two float16 steps, the first with a gradient of rank 1 that overflows; return what each rank did."""
    settings = {"dtype": "float16"} | (_LORA if adapter else {})
    learner = make_learner(model, ranks, replace(CPU, dtype="float16", adapter=adapter), settings)
    batch = prepare_batch(share(groups, ranks), data_settings(make_config(model, settings)))
    scale, found = learner.loss_scale, []
    assert scale is not None
    for step in range(2):
        before = learner.policy.snapshot()
        scale.scale = 2.0**16 if step or ranks.rank != 1 else 2.0**40  # as if its own gradient were the larger
        result = learner.train(batch)
        moved = any(
            not torch.equal(whole(before[name], keep=True), whole(weight, keep=True))
            for name, weight in learner.policy.snapshot().items()
        )
        found.append([result.updates, result.metrics["train/skipped_steps"], result.metrics["train/nonfinite"], moved])
    return found


@pytest.mark.parametrize("adapter", [None, AdapterOptions(r=4)], ids=["sharded", "adapter"])
def test_a_gradient_that_overflows_on_one_rank_is_left_out_by_all(
    tiny_model: Path, groups: list[Group], tmp_path: Path, adapter: AdapterOptions | None
) -> None:
    found = run_ranks(2, tmp_path / "meeting", overflow_on_one_rank, tiny_model, groups, adapter)
    assert found == [[[0, 1.0, 0.0, False], [1, 0.0, 0.0, True]]] * 2


def save(ranks: Ranks, model: Path, groups: list[Group], root: Path) -> None:
    learner = make_learner(model, ranks, CPU, {})
    config = TrainingConfig(model_name=str(model))
    learner.train(prepare_batch(share(groups, ranks), data_settings(config)))
    state = TrainerState(
        step=1, updates=1, policy_version=1, highest_version=1, run_id="r", run_name="n", seed=0, config={}
    )
    optimizer = WholeState(learner.optimizer) if learner.policy.is_sharded else learner.optimizer
    with learner.policy.gathered():
        ranks.on_main(lambda: save_checkpoint(root, state, learner.policy, optimizer, random_state()))


def resume(ranks: Ranks, model: Path, groups: list[Group], root: Path) -> dict[str, Any]:
    """Return the weights after a second batch, from the checkpoint of the first."""
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


def train_on_with_dropout(ranks: Ranks, model: Path, groups: list[Group], root: Path) -> list[dict[str, Any]]:
    """Return the adapter after two batches, and after the second one from a checkpoint of the first."""
    options, settings = replace(CPU, adapter=AdapterOptions(r=4, dropout=0.3)), {"weight_bridge_mode": "lora_only"}
    batch = prepare_batch(share(groups, ranks), data_settings(make_config(model, settings)))
    alone = make_learner(model, ranks, options, settings)
    alone.train(batch)
    state = TrainerState(
        step=1, updates=1, policy_version=1, highest_version=1, run_id="r", run_name="n", seed=0, config={}
    )
    random = random_state() | {"ranks": ranks.gather(random_state())}
    ranks.on_main(lambda: save_checkpoint(root, state, alone.policy, alone.optimizer, random))
    alone.train(batch)
    resumed = make_learner(model, ranks, options, settings)
    restore(root / "checkpoint-1", resumed.policy, resumed.optimizer, rank=ranks.rank)
    resumed.train(batch)
    return [learner.policy.adapter_tensors() for learner in (alone, resumed)]


def test_each_rank_goes_on_with_its_own_random_state(tiny_model: Path, groups: list[Group], tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path / "meeting", train_on_with_dropout, tiny_model, groups, tmp_path)
    for alone, resumed in found:
        assert all(np.array_equal(alone[name], resumed[name]) for name in alone)
    assert all(np.array_equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def score_one_version(ranks: Ranks, model: Path, groups: list[Group]) -> int:
    """Return how many tokens of the current version a rank scored: rank 0's groups alone were sampled with it."""
    settings = {"weight_bridge_mode": "lora_only"}
    learner = make_learner(model, ranks, replace(CPU, adapter=AdapterOptions(r=4, dropout=0.3)), settings)
    batch = prepare_batch(share(groups, ranks), data_settings(make_config(model, settings)))
    alignment = Alignment(learner, keep=0, sample_sequences=4, seed=0)
    alignment.published(1)
    versions = torch.full_like(batch.targets.versions, 1 if ranks.rank == 0 else 0)
    older = alignment.score_older(replace(batch, targets=replace(batch.targets, versions=versions)))
    assert ranks.gather("in step") == ["in step"] * ranks.world_size
    return len(older)


def test_ranks_whose_rollouts_are_of_different_versions_check_the_alignment_together(
    tiny_model: Path, groups: list[Group], tmp_path: Path
) -> None:
    compared, others = run_ranks(2, tmp_path / "meeting", score_one_version, tiny_model, groups)
    assert compared > 0
    assert others == 0


def held_after_a_forward(ranks: Ranks, model: Path) -> dict[bool, int]:
    """Return, by `--reshard-after-forward`, the layers' weights that a rank holds whole before its backward."""
    held: dict[bool, int] = {}
    for reshard in (True, False):
        settings = {"world_size": ranks.world_size, "device": "cpu", "reshard_after_forward": reshard}
        policy = load_policy(policy_options(make_config(model, settings)))
        policy.compute(lambda module: module(input_ids=torch.arange(8)[None]).logits)
        layers: Any = policy.module.get_submodule("model.layers")
        held[reshard] = sum(not isinstance(weight, DTensor) for weight in layers.parameters())
    return held


def test_gathered_weights_are_let_go_after_a_forward_unless_they_are_to_stay(tiny_model: Path, tmp_path: Path) -> None:
    for held in run_ranks(2, tmp_path / "meeting", held_after_a_forward, tiny_model):
        assert held[True] == 0
        assert held[False] > 0


def agree(ranks: Ranks) -> dict[str, Any]:
    def fail() -> None:
        raise ValueError("no broker")

    with pytest.raises((ValueError, RanksFailed), match="no broker"):
        ranks.on_main(fail)
    return {
        "led": ranks.on_main(lambda: f"from {ranks.rank}"),
        "gathered": ranks.gather(ranks.rank),
        "most": ranks.max(ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
    }


def test_ranks_agree_and_learn_what_rank_0_alone_may_do(tmp_path: Path) -> None:
    expected = {"led": "from 0", "gathered": [0, 1], "most": 1, "any": [True, False]}
    assert run_ranks(2, tmp_path / "meeting", agree) == [expected] * 2
    alone = {"led": "from 0", "gathered": [0], "most": 0, "any": [False, False]}
    assert agree(ONE) == alone


def lose_the_other(ranks: Ranks) -> str:
    exchanges: list[Callable[[], Any]] = [
        lambda: ranks.max(1),
        lambda: ranks.gather("here"),
        lambda: ranks.sum(torch.ones(1)),
        lambda: ranks.on_main(lambda: None),
    ]
    if ranks.rank == 0:
        return ""
    for exchange in exchanges:
        with pytest.raises(RanksFailed, match="rank 1 of 2 has lost the others"):
            exchange()
    return "told"


def test_a_rank_that_has_lost_the_others_says_so_in_every_exchange(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path / "meeting", lose_the_other) == ["", "told"]


def test_ranks_without_a_place_to_meet_are_told_which_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(RanksFailed, match="--init-method tcp://"),
        joined_ranks(0, 2, "env://", device="cpu", timeout_seconds=1.0),
    ):
        pass


def score_under(ranks: Ranks, model: Path, groups: list[Group]) -> list[torch.Tensor]:
    """Return logprobs under the policy, under other weights, and under the policy again."""
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
