"""A model of a 1.5B model's shape, rows of lengths as GSM8K has them, and a training step over them.

Random weights; nothing here needs a broker or a server. The device is the policy's, so a CPU runs the same code.
"""

from __future__ import annotations

import numpy as np
import torch

from example_trainer.modeling.attention import uses_varlen
from example_trainer.modeling.logprobs import head_of, token_logprobs
from example_trainer.modeling.micro_batches import Row, forward_hidden, pack_rows
from example_trainer.modeling.policy import Policy

TOKEN_BUDGET = 16_384
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second, by name, as the vendor gives them."""


def make_model(directory, layers, vocabulary, **shape):
    """Return a Qwen2 of the 1.5B shape, with the given number of layers; `shape` changes its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    usual = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=True, **{**usual, **shape}
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def make_rows(count=64, vocabulary=30_000):
    """Return groups of eight with log-normal lengths, as GSM8K's answers have."""
    generator = np.random.default_rng(0)
    rows, first = [], 0
    for number in range(count):
        prompt, answer = 96, int(np.exp(generator.normal(np.log(180), 0.6)).clip(32, 1024))
        tokens = generator.integers(0, vocabulary, prompt + answer)
        rows.append(Row(tokens=tokens, targets=prompt + np.arange(answer), first_target=first, group=number // 8))
        first += answer
    return rows


def run_step(policy: Policy, rows, layout, passes=None):
    """Run forward, loss and backward over all rows; the gradients reach the masters and are dropped there."""
    device = policy.device
    labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(device)
    with policy.holding_masters():
        for micro in micro_batches(rows, layout, device):
            logprobs = policy.compute(score, micro, labels[micro.target_index], passes)
            (-logprobs.sum() / len(labels)).backward()
    policy.collect_gradients()
    policy.drop_gradients()


def micro_batches(rows, layout, device):
    """Cut rows into micro-batches: `packed`, or padded by length (`sorted`) or in order of arrival (`padded`)."""
    if layout == "packed":
        varlen = uses_varlen(device, torch.bfloat16)
        return pack_rows(rows, TOKEN_BUDGET, device=device, layout="packed", varlen=varlen)
    groups = [rows] if layout == "sorted" else in_order(rows)
    return [micro for group in groups for micro in pack_rows(group, TOKEN_BUDGET, device=device, layout="rows")]


def in_order(rows):
    """Return consecutive rows, as many as fit the budget when padded to the longest."""
    chunks = [[]]
    for row in rows:
        longest = max(each.forward_length for each in (*chunks[-1], row))
        if chunks[-1] and (len(chunks[-1]) + 1) * longest > TOKEN_BUDGET:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


def score(module, micro, labels, passes=None):
    weight, bias = head_of(module)
    ones = torch.ones(len(labels), device=labels.device)
    states = forward_hidden(module, micro)
    return token_logprobs(states, weight, micro.hidden_index, labels, ones, bias=bias, passes=passes)[0]


def peak_bytes(action, *leaves):
    """Return the most memory that an action takes in addition; the gradients of `leaves` are dropped before."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def flop_utilisation(policy: Policy, rows, seconds):
    """Return the part of the GPU's peak that a step's forward and backward use; None for a GPU that is not listed."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    parameters = sum(parameter.numel() for parameter in policy.module.parameters())
    tokens = sum(row.forward_length for row in rows)
    return None if peak is None else 6 * parameters * tokens / seconds / peak
