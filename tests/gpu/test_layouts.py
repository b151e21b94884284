"""Packed rows through torch's variable-length attention compute what padded rows compute, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from example_trainer.model import load_policy
from example_trainer.modeling.attention import install
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.micro_batches import Row, forward_hidden, pack_rows

VOCABULARY = 1024
LAYERS = 2
SHAPES = {
    "heads-64": {"head_dim": 64, "num_key_value_heads": 8},
    "heads-128-grouped": {"head_dim": 128, "num_key_value_heads": 2},
    "heads-256-grouped": {"head_dim": 256, "num_key_value_heads": 2},
    "window": {"head_dim": 128, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 64},
}
"""Attention of each kind, with eight query heads; rows are longer than the window."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shapes")
    return {name: make_policy(directory / name, "cuda", "bfloat16", **shape) for name, shape in SHAPES.items()}


def make_policy(directory, device, dtype, **shape):
    """Return a policy with random Qwen3 weights of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_window_layers=0,
        **shape,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    policy = load_policy(PolicyOptions(model_name=str(directory), dtype=dtype, device=device))
    install(policy.module)
    return policy


def make_rows():
    generator = np.random.default_rng(0)
    rows, first = [], 0
    for group, length in enumerate((40, 333, 128, 257, 90)):
        tokens = generator.integers(0, VOCABULARY, length)
        rows.append(Row(tokens=tokens, targets=np.arange(16, length), first_target=first, group=group))
        first += length - 16
    return rows


def states_and_gradients(policy, layout, varlen):
    """Return the hidden states that predict targets, in the rows' order, and the gradients of all masters, flat."""
    (micro,) = pack_rows(make_rows(), 1 << 20, device=policy.device, layout=layout, varlen=varlen)
    hidden = policy.compute(forward_hidden, micro)[micro.hidden_index[micro.target_index.argsort()]].float()
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.device)
    (hidden * weights).mean().backward()
    policy.collect_gradients()
    below_the_head = [master for master in policy.masters.values() if master.grad is not None]
    gradients = torch.cat([master.grad.float().flatten() for master in below_the_head])
    for master in policy.masters.values():
        master.grad = None
    return hidden.detach(), gradients


def apart(found, wanted):
    """Return the distance of two tensors, of the length of the second: a wrong window or scale gives tenths."""
    return float((found - wanted).norm() / wanted.norm())


def largest_difference(policies, varlen):
    found = []
    for policy in policies:
        packed, rows = states_and_gradients(policy, "packed", varlen), states_and_gradients(policy, "rows", False)
        found += [apart(*pair) for pair in zip(packed, rows, strict=True)]
    return max(found)


def test_packed_rows_give_the_states_and_gradients_of_padded_rows(policies, record_claim):
    record_claim("packed-equals-padded", largest_difference(policies.values(), varlen=True))


def test_a_gpu_trains_packed_rows_for_each_kind_of_attention(policies, report, record_claim):
    pytest.importorskip("pydantic")
    from example_trainer.modeling.layout_choice import choose_layout

    chosen = {name: choose_layout(policy) for name, policy in policies.items()}
    report("layouts chosen", ", ".join(f"{name}: {layout}" for name, layout in chosen.items()), "packed")
    record_claim("layout-packed", set(chosen.values()) == {"packed"})
