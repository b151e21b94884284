"""One FSDP rank over NCCL takes a whole optimizer step: gradients, clipping by norm, torch's fused AdamW."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from example_trainer.model import load_policy
from example_trainer.modeling.attention import install
from example_trainer.modeling.loading import PolicyOptions, Sharding
from example_trainer.modeling.micro_batches import Row, pack_rows
from tests.gpu.training import make_model, make_rows, score

VOCABULARY = 4096
LEARNING_RATE = 1e-3


@pytest.fixture
def process_group(tmp_path):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weight_changes(directory, sharding, device, *, varlen):
    """Return how far one step moves each weight, flat and in fp32."""
    options = PolicyOptions(model_name=str(directory), dtype="bfloat16", device=device, sharding=sharding)
    policy = load_policy(options)
    install(policy.module)
    masters = list(policy.masters.values())
    before = [whole(master) for master in masters]
    rows = [
        Row(tokens=row.tokens % VOCABULARY, targets=row.targets, first_target=row.first_target, group=row.group)
        for row in make_rows(16)
    ]
    labels = torch.cat([torch.from_numpy(row.tokens[row.targets]) for row in rows]).to(policy.device)
    for micro in pack_rows(rows, 4096, device=policy.device, layout="packed", varlen=varlen):
        (-policy.compute(score, micro, labels[micro.target_index]).sum() / len(labels)).backward()
    policy.collect_gradients()
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    # Adam's first step is the gradient's sign unless eps is of its size, and the sign of rounding noise is arbitrary.
    torch.optim.AdamW(masters, lr=LEARNING_RATE, eps=1e-3, fused=True).step()
    return torch.cat([(whole(master) - old).flatten() for master, old in zip(masters, before, strict=True)])


def whole(master):
    tensor = master.full_tensor() if hasattr(master, "full_tensor") else master
    return tensor.detach().float().clone()


def test_one_fsdp_rank_steps_as_a_whole_policy_does(process_group, tmp_path, record_claim):
    directory = make_model(tmp_path / "model", layers=2, vocabulary=VOCABULARY)
    wanted, found = (weight_changes(directory, sharding, "cuda", varlen=True) for sharding in (None, Sharding()))
    record_claim("fsdp-step", float((found - wanted).norm() / wanted.norm()))
