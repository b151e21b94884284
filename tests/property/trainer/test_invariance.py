"""Loss and gradients of a step over random batches do not depend on packing, micro-batches or ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.config import TrainingConfig
from example_trainer.data import TrainingBatch
from example_trainer.distributed.rank_shares import plan_mini_batches
from example_trainer.distributed.ranks import Ranks
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.micro_batches import LayoutKind, Row
from example_trainer.modeling.policy import Policy
from example_trainer.objective.losses import Targets
from example_trainer.objective.objective import make_objective
from example_trainer.testing import make_tiny_model
from example_trainer.training import Learner

from .test_objective import batches

ONE_STEP: dict[str, Any] = {"optimizer": "adamw", "dtype": "float32", "lr": 1e-9, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    torch.set_num_threads(1)
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=1)
    made = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
    choose_layout(made)
    return made


def as_batch(rows: list[Row], seed: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    count = sum(len(row.targets) for row in rows)
    targets = Targets(
        labels=torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])),
        rollout_logprobs=-torch.rand(count, generator=generator) * 5,
        advantages=torch.randn(count, generator=generator),
        temperatures=torch.rand(count, generator=generator) + 0.5,
        sequences=torch.repeat_interleave(torch.tensor([len(row.targets) for row in rows])),
        versions=torch.ones(count, dtype=torch.long),
        version_bounds=torch.ones(count, dtype=torch.long),
    )
    return TrainingBatch(number=1, rows=rows, targets=targets, rewards=[], advantages=[], response_lengths=[])


def loss_and_gradients(policy: Policy, batch: TrainingBatch, layout: LayoutKind, **chosen: Any) -> torch.Tensor:
    config = TrainingConfig.model_validate({"model_name": "m", **ONE_STEP, **chosen})
    optimizer = torch.optim.SGD(policy.masters.values(), lr=0.0)
    objective = make_objective(config, policy)
    learner = Learner(policy, optimizer, config, objective=objective, layout=layout)
    loss = learner.train(batch).metrics["train/loss"]
    gradients = [master.grad.flatten() for master in policy.masters.values() if master.grad is not None]
    return torch.cat([torch.tensor([loss]), *gradients])


@given(
    rows=batches(),
    seed=st.integers(0, 1000),
    budget=st.integers(1, 80),
    layout=st.sampled_from(["shared", "packed", "rows"]),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    pad_to=st.sampled_from([None, 1, 64]),
)
@settings(max_examples=25)
def test_p2_packing_and_micro_batches_change_neither_loss_nor_gradient(
    policy: Policy, rows: list[Row], seed: int, budget: int, layout: LayoutKind, aggregation: str, pad_to: int | None
) -> None:
    batch = as_batch(rows, seed)
    chosen: dict[str, Any] = {"loss_aggregation": aggregation}
    whole = loss_and_gradients(policy, batch, "rows", token_budget=100_000, **chosen)
    split = loss_and_gradients(policy, batch, layout, token_budget=budget, pad_to=pad_to, **chosen)
    rounding = 2e-6 * max(1.0, float(whole.abs().max()))  # of sums over tokens, which may be small by cancellation
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=rounding)


class _Told(Ranks):
    """A rank that gets the others' values from the test; the exchange is tested over gloo elsewhere."""

    def __init__(self, rank: int, world_size: int, told: list[Any] | None = None) -> None:
        self.rank, self.world_size, self.told, self.said = rank, world_size, told, None

    def gather(self, value: Any) -> list[Any]:
        self.said = value
        return self.told if self.told is not None else [value]

    def any(self, flag: bool) -> bool:
        return True


def shared_out(rows: list[Row], parts: int, world_size: int) -> list[set[int]]:
    """Return the first targets of the rows in each optimizer step, over all ranks, which hold whole groups."""
    shares = [[row for row in rows if row.group % world_size == rank] for rank in range(world_size)]
    listeners = [_Told(rank, world_size) for rank in range(world_size)]
    for listener, share in zip(listeners, shares, strict=True):
        plan_mini_batches(share, parts, listener)
    told = [listener.said for listener in listeners]
    plans = [plan_mini_batches(share, parts, _Told(rank, world_size, told)) for rank, share in enumerate(shares)]
    return [{row.first_target for plan in plans for row in plan[step]} for step in range(len(plans[0]))]


@given(rows=batches(), parts=st.integers(2, 5), world_size=st.integers(1, 4))
def test_mini_batches_hold_the_same_rows_however_many_ranks_there_are(
    rows: list[Row], parts: int, world_size: int
) -> None:
    # Groups with exactly the same tokens may be exchanged.
    distinct = [Row(tokens=np.append(r.tokens, r.group), targets=r.targets, first_target=r.first_target, group=r.group)
                for r in rows]  # fmt: skip
    steps = shared_out(distinct, parts, world_size)
    assert steps == shared_out(distinct, parts, 1)
    assert all(steps)
    assert sorted(first for step in steps for first in step) == [row.first_target for row in rows]
