"""The learner's step on a GPU: the gain from packing, the use of the GPU, the head's memory, one FSDP rank.

Random weights of a 1.5B model's shape; nothing here needs a broker or a server. Each test records its claims.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from example_trainer.modeling.attention import install
from example_trainer.modeling.loading import PolicyOptions, Sharding
from example_trainer.modeling.logprobs import token_logprobs
from example_trainer.modeling.micro_batches import Row, pack_rows
from tests.gpu.training import (
    TOKEN_BUDGET,
    flop_utilisation,
    make_model,
    make_rows,
    micro_batches,
    peak_bytes,
    run_step,
    score,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from example_trainer.model import load_policy

    directory = make_model(tmp_path_factory.mktemp("model"), layers=28, vocabulary=151_936)
    made = load_policy(PolicyOptions(model_name=str(directory), dtype="bfloat16", device="cuda"))
    install(made.module)
    return made


def test_a_packed_step_is_a_third_faster_than_a_padded_one(policy, report, record_claim, seconds_of):
    rows = make_rows()
    kinds = ("packed", "sorted", "padded")
    packed, by_length, padded = (seconds_of(lambda kind=kind: run_step(policy, rows, kind)) for kind in kinds)
    tokens = sum(row.forward_length for row in rows)
    report("packed step of a 1.5B shape", f"{tokens / packed:,.0f} tokens/s")
    record_claim(
        "mfu",
        flop_utilisation(policy, rows, packed),
        reason=f"the peak of {torch.cuda.get_device_name()} is not known here",
    )
    record_claim("packed-to-sorted", by_length / packed)
    record_claim("packed-to-padded", padded / packed)


def test_the_loss_stage_takes_a_tenth_of_full_logits_at_most(record_claim):
    tokens, vocabulary, hidden_size = 16_384, 151_936, 1536
    weight = torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    index, ones = torch.arange(tokens, device="cuda"), torch.ones(tokens, device="cuda")

    def chunked():
        token_logprobs(hidden, weight, index, labels, ones)[0].sum().backward()

    def full():
        logits = (hidden @ weight.t()).float()
        logits.log_softmax(-1).gather(-1, labels[:, None]).sum().backward()

    peaks = [peak_bytes(action, weight, hidden) for action in (chunked, full)]
    record_claim("head-memory", peaks[0] / peaks[1])


@pytest.mark.parametrize("activations", ["kept-activations", "checkpointed", "offloaded"])
def test_a_step_takes_the_memory_that_is_counted_before_a_run(activations, tmp_path, record_claim):
    pytest.importorskip("pydantic")
    from example_trainer.config import TrainingConfig
    from example_trainer.memory.budget import budget
    from example_trainer.memory.shapes import local_shape
    from example_trainer.model import load_policy
    from example_trainer.modeling.loading import policy_options
    from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings

    directory = make_model(tmp_path / "model", layers=6, vocabulary=32_768)
    settings = {
        "device": "cuda",
        "optimizer": "adamw",
        "gradient_checkpointing": activations != "kept-activations",
        "activation_offloading": activations == "offloaded",
    }
    config = TrainingConfig(model_name=str(directory), token_budget=TOKEN_BUDGET, **settings)
    counted = budget(local_shape(str(directory)), config, server_bytes=0.0)

    def train():
        policy = load_policy(policy_options(config))
        install(policy.module)
        masters = list(policy.masters.values())
        optimizer = make_optimizer(masters, optimizer_settings(config))
        rows = make_rows(128)
        labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(policy.device)
        for _ in range(2):  # the second backward runs while the optimizer's states are there
            for micro in micro_batches(rows, "packed", policy.device):
                policy.compute(score, micro, labels[micro.target_index]).sum().backward()
            policy.collect_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    record_claim(f"memory-{activations}", peak_bytes(train) / (counted.trainer - counted.runtime))


def test_one_rank_of_fsdp_computes_what_a_whole_policy_computes(tmp_path, record_claim):
    import torch.distributed as dist

    from example_trainer.model import load_policy

    directory = make_model(tmp_path / "model", layers=2, vocabulary=4096)
    options = PolicyOptions(model_name=str(directory), dtype="bfloat16", device="cuda")
    rows = make_rows(8)
    rows = [Row(tokens=r.tokens % 4096, targets=r.targets, first_target=r.first_target, group=r.group) for r in rows]
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        found = []
        for sharding in (None, Sharding()):
            policy = load_policy(PolicyOptions(**{**as_fields(options), "sharding": sharding}))
            install(policy.module)
            found.append(logprobs_of(policy, rows))
        record_claim("fsdp-one-rank", float((found[1] - found[0]).abs().max()))
    finally:
        dist.destroy_process_group()


def as_fields(options):
    return {name: getattr(options, name) for name in options.__slots__}


@torch.no_grad()
def logprobs_of(policy, rows):
    labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(policy.device)
    (micro,) = pack_rows(rows, 1 << 20, device=policy.device, layout="packed", varlen=True)
    logprobs = policy.compute(score, micro, labels[micro.target_index])
    return logprobs[micro.target_index.argsort()].float().cpu()
