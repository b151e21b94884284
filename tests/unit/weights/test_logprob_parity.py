"""The probe's comparison: strict where both sides can agree, and no stricter than rounding allows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import ProofFailed
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.weights import logprob_parity
from example_trainer.weights.logprob_parity import (
    TOLERANCES,
    Difference,
    ProbeSample,
    _check_written,
    _checked,
    compare,
    compare_sharded,
    probe_prompts,
    prove,
    wider_precision,
)


def policy_of(path, dtype):
    return load_policy(PolicyOptions(model_name=str(path), dtype=dtype, device="cpu"))


def logits_of(module, tokens, *, rounding=False):
    """Return the logits of a server that keeps them in fp32, or of one whose head rounds them to the model's dtype."""
    if rounding:
        return module(input_ids=tokens).logits.float()
    states = module.base_model(input_ids=tokens).last_hidden_state
    return states.float() @ module.get_output_embeddings().weight.float().t()


@torch.no_grad()
def sampled_by(policy, *, noise=0.0, rounding=False):
    """Return the samples that a server with this policy's weights would give, with random noise on its logits."""
    torch.manual_seed(1)
    samples = []
    for prompt in probe_prompts(300, 256):
        outputs = torch.randint(300, (8, 32))
        tokens = torch.cat([torch.tensor(prompt).expand(8, -1), outputs], dim=1)
        with policy.autocast():
            logits = logits_of(policy.module, tokens, rounding=rounding)[:, len(prompt) - 1 : -1]
        logits += noise * torch.randn_like(logits)
        logprobs = logits.log_softmax(-1).gather(-1, outputs[..., None]).squeeze(-1)
        samples.append(ProbeSample(prompt, outputs.tolist(), logprobs.tolist()))
    return samples


def agrees(policy, samples):
    agreement = compare(policy, samples)
    return agreement.difference.within(agreement.limit)


def test_a_tensor_that_the_server_of_a_bf16_model_keeps_in_fp32_is_compared_as_it_is_written():
    master = torch.full((2,), 1.001)  # which bf16 rounds
    policy = SimpleNamespace(
        masters={"scale": master},
        served={"scale": master.clone()},
        forwards_from_masters=True,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    _check_written(policy)
    policy.served["scale"][1] = 1.002
    with pytest.raises(ProofFailed, match=r"1 served tensors differ from the trainer's \(scale\)"):
        _check_written(policy)


def test_fp32_of_an_ill_conditioned_model_is_allowed_what_fp32_rounds_and_not_more(tiny_family):
    """With weights much larger than usual the trainer's own rounding exceeds the fixed limit."""
    policy = policy_of(tiny_family("llama"), "float32")
    policy.load_masters({name: tensor * 12 for name, tensor in policy.snapshot().items()})
    agreement = compare(policy, sampled_by(policy))
    assert agreement.limit.maximum > TOLERANCES[torch.float32].maximum
    assert not agrees(policy, sampled_by(policy, noise=0.05))


def test_r5_fp32_is_held_to_its_fixed_limits_over_two_thousand_tokens(tiny_family):
    policy = policy_of(tiny_family("llama"), "float32")
    agreement = compare(policy, sampled_by(policy))
    assert agreement.tokens >= 2000
    assert agreement.limit == TOLERANCES[torch.float32] == Difference(1e-4, 5e-6)
    assert agrees(policy, sampled_by(policy))
    assert not agrees(policy, sampled_by(policy, noise=1e-4))


def test_a_check_beside_a_forward_on_other_weights_compares_the_policys_own(tiny_family):
    """An overlapped publish is proven while the next batch scores the tokens that older versions sampled."""
    policy = policy_of(tiny_family("llama"), "float32")
    samples, limit = sampled_by(policy), TOLERANCES[torch.float32]
    older = {name: tensor * 2 for name, tensor in policy.snapshot().items()}
    with ThreadPoolExecutor(1) as pool:
        with policy.with_weights(older):
            comparing = pool.submit(compare, policy, samples, limit)
            assert not wait([comparing], timeout=1.0).done
        assert comparing.result(60).difference.within(limit)


def test_the_proof_computes_the_head_in_fp32_as_training_does_and_not_as_the_module(tiny_family):
    """Logits of a trained model's size, which a bf16 head rounds by more than bf16 with fp32 heads is allowed."""
    policy = policy_of(tiny_family("llama"), "bfloat16")
    with torch.no_grad():
        policy.masters["lm_head.weight"].mul_(8 / logits_of(policy.module, torch.arange(3, 43)[None]).std())
    by_module = compare(policy, sampled_by(policy, rounding=True)).difference
    by_own_head = compare(policy, sampled_by(policy)).difference
    assert by_own_head.maximum <= 1e-4
    assert by_module.mean > TOLERANCES[torch.bfloat16].mean


def test_bf16_is_allowed_what_bf16_rounds_and_not_more(tiny_family):
    policy = policy_of(tiny_family("llama"), "bfloat16")
    in_fp32 = policy_of(tiny_family("llama"), "float32")
    assert agrees(policy, sampled_by(in_fp32)), "as far off as a server that rounds elsewhere"
    assert not agrees(policy, sampled_by(policy, noise=0.15))


@pytest.mark.parametrize(("noise", "fits"), [(0.0, True), (0.01, True), (0.5, False)])
def test_bf16_that_is_sharded_over_ranks_is_allowed_what_the_demos_base_rounds(tiny_family, noise, fits):
    """Its rounding is not measured: a difference of 0.27 and 8.9e-3 in the mean was seen between right weights."""
    policy = policy_of(tiny_family("llama"), "bfloat16")
    agreement = compare_sharded(policy, sampled_by(policy, noise=noise), None)
    assert agreement.difference.within(agreement.limit) is fits
    assert Difference(0.27, 8.9e-3).within(agreement.limit)


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "gpt2", "phi3"])
def test_wider_precision_is_the_fp32_forward_and_leaves_no_trace(tiny_family, family):
    policy = policy_of(tiny_family(family), "bfloat16")
    reference = policy_of(tiny_family(family), "float32")
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


@pytest.mark.parametrize(("difference", "fits"), [((1.0, 1.0), True), ((1.1, 0.0), False), ((0.0, 1.1), False)])
def test_neither_the_worst_token_nor_the_mean_may_be_beyond_its_limit(difference, fits):
    assert Difference(*difference).within(Difference(1.0, 1.0)) is fits


@pytest.mark.parametrize(
    ("spans", "boot_id"),
    [([[0, 1, 6], [1, 2, 7]], "boot"), ([[0, 2, 6]], "boot"), ([[0, 2, None]], "boot"), ([[0, 2, 7]], "boots")],
)
def test_an_answer_of_another_version_or_of_another_start_proves_nothing(spans, boot_id):
    answer = {"policy_versions": [[[0, 2, 7]], spans], "token_ids": [[1, 2]] * 2, "logprobs": [[-1.0] * 2] * 2}
    with pytest.raises(ProofFailed, match="version 7"):
        _checked([1], answer | {"boot_id": boot_id}, version=7, boot_id="boot")


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (0.01, False)])
@pytest.mark.parametrize("nested", [False, True], ids=["its own config", "a config within another"])
def test_a_server_that_tells_other_logprobs_is_found(tiny_family, monkeypatch, off, agrees, nested):
    monkeypatch.setattr(logprob_parity, "_PROMPT_LENGTHS", (4,))
    policy = policy_of(tiny_family("qwen2"), "float32")
    if nested:
        text = policy.hf_config
        policy.hf_config = SimpleNamespace(get_text_config=lambda: text)

    def generate(request):
        prompt = request["prompt"]["prompt_token_ids"]
        with torch.no_grad():
            logits = policy.module(input_ids=torch.tensor([[*prompt, 7]])).logits[0, len(prompt) - 1]
        told = logits.log_softmax(-1)[7].item() + off
        return {"token_ids": [[7]], "logprobs": [[told]], "policy_versions": [[[0, 1, 2]]], "boot_id": "boot"}

    settings = {"version": 2, "boot_id": "boot", "max_model_len": 64, "limit": TOLERANCES[torch.float32]}
    if agrees:
        prove(policy, generate, **settings)
    else:
        with pytest.raises(ProofFailed, match="disagree on version 2"):
            prove(policy, generate, **settings)
