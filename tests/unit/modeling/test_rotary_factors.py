"""LongRoPE: a row has the rotary factors of the server's context, whatever rows are computed with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.micro_batches import Row, forward_hidden, pack_rows
from example_trainer.modeling.policy import Policy
from tests.unit.conftest import LONG_ROPE_CONTEXT, ROTARY_FEATURES

SHORT, LONG = 40, 100


def load(folder: Path, context_length: int | None) -> Policy:
    return load_policy(
        PolicyOptions(model_name=str(folder), dtype="float32", device="cpu", context_length=context_length)
    )


def states_of_a_short_row(policy: Policy, *, beside_a_long_one: bool) -> Tensor:
    draws = np.random.default_rng(0)
    rows = [Row(tokens=draws.integers(3, 300, SHORT), targets=np.arange(20, SHORT), first_target=0, group=0)]
    if beside_a_long_one:
        targets = np.arange(50, LONG)
        rows.append(Row(tokens=draws.integers(3, 300, LONG), targets=targets, first_target=SHORT - 20, group=1))
    with torch.no_grad():
        (micro,) = pack_rows(rows, 1 << 20, device=policy.device, layout=choose_layout(policy))
        hidden = policy.compute(forward_hidden, micro)
    return hidden[micro.hidden_index[micro.target_index.argsort()]][: SHORT - 20]


def test_a_row_is_computed_alike_alone_and_beside_a_longer_one(tiny_family: Callable[[str], Path]) -> None:
    policy = load(tiny_family("phi3-long"), context_length=512)
    alone, beside = (states_of_a_short_row(policy, beside_a_long_one=long) for long in (False, True))
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("context_length", "kept"),
    [(LONG_ROPE_CONTEXT, "short_factor"), (LONG_ROPE_CONTEXT + 1, "long_factor"), (None, "long_factor")],
)
def test_the_factors_are_those_that_vllm_takes_for_its_context(
    tiny_family: Callable[[str], Path], context_length: int | None, kept: str
) -> None:
    policy = load(tiny_family("phi3-long"), context_length)
    stored = policy.hf_config.rope_parameters
    assert stored["short_factor"] != stored["long_factor"], "written checkpoints keep both"
    exponents = torch.arange(0, 2 * ROTARY_FEATURES, 2) / (2 * ROTARY_FEATURES)
    expected = 1.0 / (torch.tensor(stored[kept]) * stored["rope_theta"] ** exponents)
    states_of_a_short_row(policy, beside_a_long_one=False)
    module: Any = policy.module
    torch.testing.assert_close(module.model.rotary_emb.inv_freq, expected)
