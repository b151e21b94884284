"""The probe's comparison: strict where both sides can agree, and no stricter than rounding allows."""

from __future__ import annotations

import pytest
import torch

from example_trainer.model import PolicyOptions, load_policy
from example_trainer.weights.proof import TOLERANCES, Difference, _Sample, compare, probe_prompts, wider_precision


def policy_of(path, dtype):
    return load_policy(PolicyOptions(model_name=str(path), dtype=dtype, device="cpu"))


@torch.no_grad()
def sampled_by(policy, *, noise=0.0):
    """What a server with this policy's weights would answer, its logits off by random noise."""
    torch.manual_seed(1)
    samples = []
    for prompt in probe_prompts(300, 256):
        outputs = torch.randint(300, (8, 32))
        tokens = torch.cat([torch.tensor(prompt).expand(8, -1), outputs], dim=1)
        with policy.autocast():
            logits = policy.module(input_ids=tokens).logits[:, len(prompt) - 1 : -1].float()
        logits += noise * torch.randn_like(logits)
        logprobs = logits.log_softmax(-1).gather(-1, outputs[..., None]).squeeze(-1)
        samples.append(_Sample(prompt, outputs.tolist(), logprobs.tolist()))
    return samples


def agrees(policy, samples):
    agreement = compare(policy, samples)
    return agreement.difference.within(agreement.limit)


def test_fp32_of_an_ill_conditioned_model_is_allowed_what_fp32_rounds_and_not_more(tiny_model):
    """Weights much larger than usual: the trainer alone is off by more than the fixed limit."""
    policy = policy_of(tiny_model("llama"), "float32")
    policy.load_masters({name: tensor * 12 for name, tensor in policy.snapshot().items()})
    agreement = compare(policy, sampled_by(policy))
    assert agreement.limit.maximum > TOLERANCES[torch.float32].maximum
    assert not agrees(policy, sampled_by(policy, noise=0.05))


def test_r5_fp32_is_held_to_its_fixed_limits_over_two_thousand_tokens(tiny_model):
    policy = policy_of(tiny_model("llama"), "float32")
    agreement = compare(policy, sampled_by(policy))
    assert agreement.tokens >= 2000
    assert agreement.limit == TOLERANCES[torch.float32] == Difference(1e-4, 5e-6)
    assert agrees(policy, sampled_by(policy))
    assert not agrees(policy, sampled_by(policy, noise=1e-4))


def test_bf16_is_allowed_what_bf16_rounds_and_not_more(tiny_model):
    policy = policy_of(tiny_model("llama"), "bfloat16")
    in_fp32 = policy_of(tiny_model("llama"), "float32")
    assert agrees(policy, sampled_by(in_fp32)), "as far off as a server that rounds elsewhere"
    assert not agrees(policy, sampled_by(policy, noise=0.15))


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "gpt2", "phi3"])
def test_wider_precision_is_the_fp32_forward_and_leaves_no_trace(tiny_model, family):
    policy = policy_of(tiny_model(family), "bfloat16")
    reference = policy_of(tiny_model(family), "float32")
    reference.load_masters({name: tensor.float() for name, tensor in policy.snapshot().items()})
    tokens = torch.arange(3, 43).view(2, 20)
    before = dict(policy.module.named_parameters())
    with torch.no_grad(), wider_precision(policy.module, torch.float32), policy.autocast():
        wide = policy.module(input_ids=tokens).logits
    torch.testing.assert_close(wide, reference.module(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(parameter is before[name] for name, parameter in policy.module.named_parameters())


def test_prompts_reach_beyond_a_cache_block_and_never_beyond_the_context():
    assert max(map(len, probe_prompts(300, 4096))) > 128
    assert max(map(len, probe_prompts(300, 64))) + 32 <= 64
    assert probe_prompts(300, 64) == probe_prompts(300, 64)
