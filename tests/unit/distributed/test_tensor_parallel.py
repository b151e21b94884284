"""Tensor parallelism gives the logprobs, gradients, weights and checkpoints of one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atropos_api.wire import Batch, Group
from example_trainer.checkpointing import restore, save_checkpoint
from example_trainer.data import data_settings, prepare_batch
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import UnsupportedModel
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.shards import WholeState, local_part, whole
from example_trainer.modeling.tensor_parallel import check_divisible, parallelize
from example_trainer.state import TrainerState, random_state
from example_trainer.testing import Sampler

from .ranks import run_ranks
from .test_ranks import CPU, ONE, make_config, make_learner, share

TENSOR_PARALLEL = 2
MODELS = ("qwen2 tied", "qwen3", "llama")


@dataclass(frozen=True)
class Case:
    """A model and the settings of its runs."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: PolicyOptions = CPU
    tolerance: float = 1e-6


CASES = {
    "tied": Case("qwen2 tied"),
    "norms of heads": Case("qwen3", {"kl_coef": 0.1, "mini_batches": 2}, replace(CPU, gradient_checkpointing=True)),
    "a head of its own": Case("llama", {"optimizer": "adamw_8bit", "advantage_norm": "batch"}),
    "a frozen layer": Case(
        "qwen2 tied",
        {"optimizer": "adafactor", "lr": 1e-4},
        replace(CPU, train_layer_indices="1", master_weights="host"),
        tolerance=1e-4,
    ),
    "masters in bf16": Case(
        "qwen3",
        {"dtype": "bfloat16", "master_weights": "none"},
        replace(CPU, dtype="bfloat16", master_weights="none"),
        tolerance=3e-2,
    ),
}
STATE = TrainerState(
    step=1, updates=1, policy_version=1, highest_version=1, run_id="r", run_name="n", seed=0, config={}
)


def write_model(kind: str, directory: Path) -> Path:
    """Write a model of some thousand parameters; qwen3 has norms of heads, llama biases and a head of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind.split(maxsplit=1)[0],
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings="tied" in kind,
        attention_bias=True,
        initializer_range=0.2,
    )
    path = directory / kind.replace(" ", "-")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def batch_of(groups: list[Group], ranks: Ranks, model: Path, settings: dict[str, Any]) -> Any:
    data = data_settings(make_config(model, settings))
    return prepare_batch(share(groups, ranks), data, whole=Batch(number=1, run_id="r", groups=groups))


def train(ranks: Ranks, models: dict[str, Path], groups: list[Group], root: Path) -> dict[str, Any]:
    """Return by case metrics, logprobs, gradients and weights of two batches, and those after a resume between."""
    return {name: train_one(ranks, models[case.model], groups, root / name, case) for name, case in CASES.items()}


def train_one(ranks: Ranks, model: Path, groups: list[Group], root: Path, case: Case) -> dict[str, Any]:
    learner = make_learner(model, ranks, case.options, case.settings)
    batch = batch_of(groups, ranks, model, case.settings)
    own = {"scored": learner.score(batch.rows, batch.targets), "metrics": learner.train(batch).metrics}
    masters = learner.policy.masters
    own["gradients"] = whole({key: master.grad for key, master in masters.items()}, keep=True)
    optimizer = WholeState(learner.optimizer) if learner.policy.is_sharded else learner.optimizer
    with learner.policy.gathered():
        ranks.on_main(lambda: save_checkpoint(root, STATE, learner.policy, optimizer, random_state()))
    own["held"] = sum(local_part(master).numel() for master in masters.values())
    learner.train(batch)
    own["weights"] = whole({key: master.detach() for key, master in masters.items()}, keep=True)
    resumed = make_learner(model, ranks, case.options, case.settings)
    restore(root / "checkpoint-1", resumed.policy, resumed.optimizer)
    resumed.train(batch)
    own["resumed"] = whole({key: master.detach() for key, master in resumed.policy.masters.items()}, keep=True)
    return own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, directory) for kind in MODELS}


@pytest.fixture(scope="module")
def groups(models: dict[str, Path]) -> list[Group]:
    model = models["llama"]
    weights = load_policy(replace(CPU, model_name=str(model))).snapshot()
    sampler = Sampler(model, seed=3)
    return [sampler.sample(weights, 1, lambda a: float(sum(a) % 3), group_size=size) for size in (6, 3, 4)]


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], groups: list[Group], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """The results of one process, those of 2 x 2 ranks, and the directory of their checkpoints."""
    directory = tmp_path_factory.mktemp("trained")
    alone = train(ONE, models, groups, directory / "alone")
    ranks = run_ranks(
        4,
        directory / "meeting",
        train,
        models,
        groups,
        directory / "together",
        tensor_parallel_size=TENSOR_PARALLEL,
    )
    return alone, ranks, directory


@pytest.mark.parametrize("case", CASES)
def test_two_by_two_ranks_end_with_the_weights_of_one_process(case: str, trained: Any) -> None:
    alone, ranks, _ = trained
    expected, tolerance = alone[case], CASES[case].tolerance
    assert sum(rank[case]["held"] for rank in ranks) < 1.1 * expected["held"], "only norms and biases are held twice"
    for found in (rank[case] for rank in ranks):
        for kind in ("gradients", "weights", "resumed"):
            assert found[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                np.testing.assert_allclose(
                    found[kind][name], tensor.float().numpy(), rtol=0, atol=tolerance, err_msg=name
                )
        for name in found["metrics"].keys() - {"perf/forward_tokens"}:
            assert found["metrics"][name] == pytest.approx(
                expected["metrics"][name], rel=10 * tolerance, abs=tolerance
            ), name


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_of_a_group_score_the_same_rows_and_as_one_process(case: str, trained: Any) -> None:
    alone, ranks, _ = trained
    scores = [rank[case]["scored"] for rank in ranks]
    for first in (0, 2):
        assert np.array_equal(scores[first], scores[first + 1], equal_nan=True)
    together = np.sort(np.concatenate([scores[0], scores[2]]))
    np.testing.assert_allclose(
        together, np.sort(alone[case]["scored"].numpy()), rtol=0, atol=10 * CASES[case].tolerance
    )


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_bit_for_bit_from_the_checkpoint_of_its_group(case: str, trained: Any) -> None:
    for found in (rank[case] for rank in trained[1]):
        assert all(np.array_equal(found["resumed"][name], found["weights"][name]) for name in found["weights"])


def test_one_process_goes_on_from_the_checkpoint_of_a_group(
    models: dict[str, Path], groups: list[Group], trained: Any
) -> None:
    alone, _, directory = trained
    for name, case in CASES.items():
        model = models[case.model]
        learner = make_learner(model, ONE, case.options, case.settings)
        restore(directory / "together" / name / "checkpoint-1", learner.policy, learner.optimizer)
        learner.train(batch_of(groups, ONE, model, case.settings))
        for key, master in learner.policy.masters.items():
            torch.testing.assert_close(master.detach(), alone[name]["weights"][key], rtol=0, atol=case.tolerance)


def test_heads_that_cannot_be_divided_are_reported_with_the_sizes_that_fit() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(num_attention_heads=12, num_key_value_heads=2, intermediate_size=96, vocab_size=64)
    check_divisible(config, 2)
    with pytest.raises(
        UnsupportedModel, match=r"^--trainer-tensor-parallel-size 4 .*num_key_value_heads of 2; use 1 or 2"
    ):
        check_divisible(config, 4)


@pytest.mark.parametrize(("kind", "words"), [("gpt2", "has no plan"), ("qwen3_moe", "needs .* which is not supported")])
def test_a_model_that_cannot_be_divided_is_reported_in_one_line(kind: str, words: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    with pytest.raises(
        UnsupportedModel, match=rf"ForCausalLM {words}; use --trainer-tensor-parallel-size 1$|LMHead.* {words}"
    ):
        parallelize(module, None)  # type: ignore[arg-type]
