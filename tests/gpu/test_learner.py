"""The learner's step on a GPU: what packing is worth, how much of the GPU it uses, the head's memory, one FSDP rank.

Random weights of a 1.5B model's shape; nothing here needs a broker or a server. Each test prints its figures (`-s`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from example_trainer.modeling.attention import install
from example_trainer.modeling.loading import PolicyOptions, Sharding
from example_trainer.modeling.logprobs import head_of, token_logprobs
from example_trainer.modeling.micro_batches import Row, forward_hidden, pack_rows
from example_trainer.modeling.policy import Policy

TOKEN_BUDGET = 16_384
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second, by name, as the vendor gives them."""


def make_model(directory, layers, vocabulary):
    """Qwen2 of the 1.5B shape, with as many layers as asked for."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from example_trainer.model import load_policy

    directory = make_model(tmp_path_factory.mktemp("model"), layers=28, vocabulary=151_936)
    made = load_policy(PolicyOptions(model_name=str(directory), dtype="bfloat16", device="cuda"))
    install(made.module)
    return made


def make_rows(count=64):
    """Groups of eight with log-normal lengths, as GSM8K's answers have them."""
    generator = np.random.default_rng(0)
    rows, first = [], 0
    for number in range(count):
        prompt, answer = 96, int(np.exp(generator.normal(np.log(180), 0.6)).clip(32, 1024))
        tokens = generator.integers(0, 30_000, prompt + answer)
        rows.append(Row(tokens=tokens, targets=prompt + np.arange(answer), first_target=first, group=number // 8))
        first += answer
    return rows


def run_step(policy: Policy, rows, layout):
    """Forward, loss and backward over all rows."""
    device = policy.device
    labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(device)
    for micro in micro_batches(rows, layout, device):
        logprobs = policy.compute(score, micro, labels[micro.target_index])
        (-logprobs.sum() / len(labels)).backward()
    for master in policy.masters.values():
        master.grad = None


def micro_batches(rows, layout, device):
    """`packed`; `sorted`: padded among rows of like length; `padded`: in the order of arrival, as most trainers pad."""
    if layout == "packed":
        return pack_rows(rows, TOKEN_BUDGET, device=device, layout="packed", varlen=True)
    groups = [rows] if layout == "sorted" else in_order(rows)
    return [micro for group in groups for micro in pack_rows(group, TOKEN_BUDGET, device=device, layout="rows")]


def in_order(rows):
    """Consecutive rows, as many as fit the budget when they are padded to the longest."""
    chunks = [[]]
    for row in rows:
        longest = max(each.forward_length for each in (*chunks[-1], row))
        if chunks[-1] and (len(chunks[-1]) + 1) * longest > TOKEN_BUDGET:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


def score(module, micro, labels):
    weight, bias = head_of(module)
    ones = torch.ones(len(labels), device=labels.device)
    return token_logprobs(forward_hidden(module, micro), weight, micro.hidden_index, labels, ones, bias=bias)[0]


def test_a_packed_step_is_a_third_faster_than_a_padded_one(policy, report, seconds_of):
    rows = make_rows()
    kinds = ("packed", "sorted", "padded")
    packed, by_length, padded = (seconds_of(lambda kind=kind: run_step(policy, rows, kind)) for kind in kinds)
    tokens = sum(row.forward_length for row in rows)
    parameters = sum(parameter.numel() for parameter in policy.module.parameters())
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    used = "unknown" if peak is None else f"{6 * parameters * tokens / packed / peak:.1%}"
    report("packed step of a 1.5B shape", f"{tokens / packed:,.0f} tokens/s, MFU {used}")
    report("packed to padded step, in tokens of the sequences a second", f"{padded / packed:.2f}", "at least 1.35")
    report("packed to a step padded among rows of like length", f"{by_length / packed:.2f}")
    assert padded / packed >= 1.35


def test_the_loss_stage_takes_a_tenth_of_full_logits_at_most(report):
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
    report(f"loss stage at {tokens} tokens, of full logits", f"{peaks[0] / peaks[1]:.3f}", "at most 0.1")
    assert peaks[0] <= peaks[1] / 10


def peak_bytes(action, *leaves):
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept activations", "checkpointed"])
def test_a_step_takes_the_memory_that_is_counted_before_a_run(checkpointing, tmp_path, report):
    pytest.importorskip("pydantic")
    from example_trainer.config import TrainingConfig
    from example_trainer.memory.budget import budget
    from example_trainer.memory.shapes import local_shape
    from example_trainer.model import load_policy
    from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
    from example_trainer.weights.factory import policy_options

    directory = make_model(tmp_path / "model", layers=6, vocabulary=32_768)
    settings = {"device": "cuda", "optimizer": "adamw", "gradient_checkpointing": checkpointing}
    config = TrainingConfig(model_name=str(directory), token_budget=TOKEN_BUDGET, **settings)
    counted = budget(local_shape(str(directory)), config, server_bytes=0.0)

    def train():
        policy = load_policy(policy_options(config))
        install(policy.module)
        masters = list(policy.masters.values())
        optimizer = make_optimizer(masters, optimizer_settings(config))
        rows = make_rows(128)
        labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(policy.device)
        for _ in range(2):  # the second backward runs beside the optimizer's states
            for micro in micro_batches(rows, "packed", policy.device):
                policy.compute(score, micro, labels[micro.target_index]).sum().backward()
            policy.collect_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    found = peak_bytes(train) / (counted.trainer - counted.runtime)
    report(f"peak memory of a step, of what is counted ({settings})", f"{found:.2f}", "0.6 to 1")
    assert 0.6 <= found <= 1.0


def test_one_rank_of_fsdp_computes_what_a_whole_policy_computes(tmp_path, report):
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
        apart = float((found[1] - found[0]).abs().max())
        report("logprobs of one FSDP rank, from a whole policy's", f"at most {apart:.1e} apart", "below 1e-3")
        assert apart < 1e-3
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
