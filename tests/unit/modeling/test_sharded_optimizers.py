"""Every optimizer steps sharded weights as a process steps whole ones; its checkpoint fits any number of ranks."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # as FSDP shards layers that are divided already

from example_trainer.distributed.ranks import Ranks
from example_trainer.modeling import optimizers
from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer
from example_trainer.modeling.shards import local_part, shard_optimizer_state, whole
from tests.unit.distributed.ranks import run_ranks

STEPS = 3
SHAPES: dict[str, tuple[int, ...]] = {
    "rows of whole blocks": (20, 512),
    "rows that end inside a block": (24, 300),
    "fewer rows than ranks": (3, 2048),
    "narrow": (66, 70),
    "experts": (5, 12, 260),
    "a vector": (33,),
}
CASES: dict[str, tuple[str, torch.dtype, float]] = {
    "adamw": ("adamw", torch.float32, 1e-6),
    "8-bit": ("adamw_8bit", torch.float32, 1e-6),
    "adafactor": ("adafactor", torch.float32, 1e-6),
    "adamw in bf16": ("adamw", torch.bfloat16, 2e-2),  # the spacing of the largest weights
    "8-bit in bf16": ("adamw_8bit", torch.bfloat16, 2e-2),
}


def values(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


DIVIDED: dict[str, list[Placement]] = {
    "rows of whole blocks": [Shard(0), Shard(1)],
    "rows that end inside a block": [_StridedShard(0, split_factor=2), Shard(0)],
    "narrow": [Shard(0), Shard(1)],
}
"""The matrices that tensor parallelism divides, by rows or by columns."""


def sharded(name: str, tensor: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None:
        return tensor
    placements = [Shard(0)] if mesh.ndim == 1 else DIVIDED.get(name, [Shard(0), Replicate()])
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def make(start: dict[str, torch.Tensor], name: str, mesh: DeviceMesh | None) -> tuple[Any, torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(sharded(key, tensor.clone(), mesh)) for key, tensor in start.items()]
    settings = OptimizerSettings(name=name, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    return parameters, make_optimizer(parameters, settings)


def step(parameters: Any, optimizer: torch.optim.Optimizer, seed: int, mesh: DeviceMesh | None) -> None:
    gradients = values(seed, parameters[0].dtype).items()
    for parameter, (name, gradient) in zip(parameters, gradients, strict=True):
        parameter.grad = sharded(name, gradient, mesh)
    optimizer.step()


def train_all(ranks: Ranks, saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results by mesh: of one dimension, and for four ranks also of two, as with tensor parallelism."""
    meshes = {"data": init_device_mesh("cpu", (ranks.world_size,))}
    if ranks.world_size == 4:
        meshes["tensor"] = init_device_mesh("cpu", (2, 2))
    return {name: train(mesh, saved) for name, mesh in meshes.items()}


def train(mesh: DeviceMesh | None, saved: dict[str, Any] | None) -> dict[str, Any]:
    """Return by case whole weights after some steps, the state, and the weights after a step from a `saved` state."""
    optimizers.PIECE_ELEMENTS = 1500  # several pieces of each matrix, some of which two ranks share
    found: dict[str, Any] = {}
    for case, (name, dtype, _) in CASES.items():
        start = values(0, dtype)
        parameters, optimizer = make(start, name, mesh)
        for seed in range(1, STEPS + 1):
            step(parameters, optimizer, seed, mesh)
        found[case] = {
            "weights": [whole(each.detach(), keep=True).float() for each in parameters],
            "held": sum(local_part(each).numel() for each in parameters),
            "state": deepcopy(whole(optimizer.state_dict(), keep=True)),
        }
        parameters, optimizer = make(start, name, mesh)
        state = deepcopy(found[case]["state"] if saved is None else saved[case])  # AdamW steps in loaded tensors
        optimizer.load_state_dict(shard_optimizer_state(state, optimizer) if mesh else state)
        step(parameters, optimizer, STEPS + 1, mesh)
        found[case]["resumed"] = [whole(each.detach(), keep=True).float() for each in parameters]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The results of one process and, by ranks and mesh, those of each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "PIECE_ELEMENTS", optimizers.PIECE_ELEMENTS)
        alone = train(None, None)
    states = {case: found["state"] for case, found in alone.items()}
    directory = tmp_path_factory.mktemp("sharded")
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (2, 4):
        for rank in run_ranks(size, directory / f"meeting-{size}", train_all, states):
            for mesh, results in rank.items():
                found.setdefault(f"{size} {mesh}", []).append(results)
    return alone, found


@pytest.mark.parametrize("case", CASES)
def test_sharded_weights_go_where_whole_ones_go_from_the_start_and_from_a_checkpoint_of_one_process(
    case: str, trained: Any
) -> None:
    alone, together = trained
    assert together.keys() == {"2 data", "4 data", "4 tensor"}
    tolerance = CASES[case][2]
    for mesh, ranks in together.items():
        if mesh != "4 tensor":
            assert sum(found[case]["held"] for found in ranks) == alone[case]["held"], "each weight is held once"
        for found in ranks:
            for kind in ("weights", "resumed"):
                for name, left, right in zip(SHAPES, found[case][kind], alone[case][kind], strict=True):
                    np.testing.assert_allclose(left, right.numpy(), rtol=0, atol=tolerance, err_msg=f"{mesh} {name}")


@pytest.mark.parametrize("mesh", ["4 data", "4 tensor"])
@pytest.mark.parametrize("case", CASES)
def test_a_state_gathered_from_ranks_is_that_of_one_process(case: str, mesh: str, trained: Any) -> None:
    expected, found = trained[0][case]["state"], trained[1][mesh][0][case]["state"]
    states = [state.get("inner", state)["state"] for state in (expected, found)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        for name, value in state.items():
            left, right = np.asarray(states[1][number][name]), np.asarray(value)
            np.testing.assert_allclose(left, right, rtol=0, atol=CASES[case][2], err_msg=f"{number} {name}")


def test_a_state_that_was_divided_otherwise_is_refused() -> None:
    parameters, optimizer = make(values(0, torch.float32), "adamw_8bit", None)
    step(parameters, optimizer, 1, None)
    state = optimizer.state_dict()
    first = state["state"][0]
    for other, words in (
        ({"absmax1": torch.zeros(20, 4)}, r"shape \(20, 4\).*\(20, 2\) fits"),
        ({"row_length": 448}, "rows of 448 elements; here they have 512"),
    ):
        state["state"][0] = first | other
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
def test_the_steps_are_those_of_the_published_optimizer(name: str) -> None:
    """Adafactor is compared with transformers', and 8-bit Adam with bitsandbytes' where its blocks are whole rows."""
    start = values(0, torch.float32)
    start = {key: start[key] for key in ("rows of whole blocks", "a vector", "fewer rows than ranks")}
    ours, optimizer = make(start, name, None)
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in start.values()]
    groups = [
        {"params": [each for each in theirs if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in theirs if each.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "adafactor":
        from transformers.optimization import Adafactor

        published: Any = Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    else:
        import bitsandbytes

        published = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2)
    for seed in range(1, STEPS + 1):
        gradients = values(seed, torch.float32)
        for key, left, right in zip(start, ours, theirs, strict=True):
            left.grad, right.grad = gradients[key].clone(), gradients[key].clone()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            published.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
