"""Adapters are those that PEFT makes by the same settings, are trained in place, and load anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from example_trainer.errors import AdapterUnavailable, BadLayerFilter
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.lora import AdapterOptions, inject
from example_trainer.modeling.policy import Policy

TOKENS = torch.arange(3, 43).view(2, 20)
TARGETS = {"gpt2": ("c_attn",), "phi3": ("qkv_proj",)}


def load(path: Path, *, dtype: str = "float32", gradient_checkpointing: bool = False, **adapter: object) -> Policy:
    options = AdapterOptions(**{"r": 4, "alpha": 8, **adapter})  # type: ignore[arg-type]
    return load_policy(
        PolicyOptions(
            model_name=str(path),
            dtype=dtype,
            device="cpu",
            adapter=options,
            gradient_checkpointing=gradient_checkpointing,
        )
    )


def disturb(policy: Policy) -> None:
    """Change the weights as training would: B is no longer zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(torch.randn_like(master) * 0.1)


def logits_of(policy: Policy) -> torch.Tensor:
    with policy.autocast():
        logits: torch.Tensor = policy.module(input_ids=TOKENS).logits
    return logits


def store(policy: Policy, directory: Path) -> Path:
    directory.mkdir()
    save_file(policy.adapter_tensors(), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(policy.adapter_config()))
    return directory


@pytest.mark.parametrize("family", ["qwen2-tied", "llama", "phi3", "gpt2"])
@pytest.mark.parametrize("layers", [None, "1"])
def test_peft_loads_what_is_stored_and_computes_the_same_logits(tiny_family, tmp_path, family, layers):
    policy = load(tiny_family(family), target_modules=TARGETS.get(family, ("q_proj", "v_proj")), layer_indices=layers)
    disturb(policy)
    base = AutoModelForCausalLM.from_pretrained(tiny_family(family))
    foreign = peft.PeftModel.from_pretrained(base, store(policy, tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.equal(foreign(input_ids=TOKENS).logits, logits_of(policy))


@pytest.mark.parametrize("family", ["qwen2-tied", "phi3", "gpt2"])
def test_merged_weights_are_a_checkpoint_that_computes_the_same(tiny_family, family):
    policy = load(tiny_family(family), target_modules=("all-linear",))
    disturb(policy)
    merged = AutoModelForCausalLM.from_pretrained(tiny_family(family))
    tensors = policy.checkpoint_tensors()
    merged.load_state_dict(tensors, strict="lm_head.weight" in tensors)
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, logits_of(policy), rtol=1e-4, atol=1e-4)


def test_only_the_adapter_is_trained_in_fp32_over_a_base_in_the_served_dtype(tiny_family):
    policy = load(tiny_family("llama"), dtype="bfloat16")
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    assert {parameter.dtype for parameter in policy.module.parameters()} == {torch.bfloat16}
    assert len(policy.masters) == 3 * 2 * 2
    disturb(policy)
    logits_of(policy).float().square().mean().backward()
    policy.collect_gradients()
    assert all(master.grad is not None and master.grad.abs().sum() > 0 for master in policy.masters.values())
    assert all(p.grad is None for p in policy.module.parameters())
    assert policy.stale_weights() == []


def test_without_its_adapter_the_policy_is_the_base_and_with_it_again_afterwards(tiny_family):
    policy = load(tiny_family("llama"))
    base = logits_of(policy).detach()
    disturb(policy)
    trained = logits_of(policy).detach()
    with policy.without_adapter():
        alone = logits_of(policy)
    assert not alone.requires_grad
    assert torch.equal(alone, base)
    assert torch.equal(logits_of(policy), trained)
    assert not torch.equal(trained, base)
    logits_of(policy).square().mean().backward()
    assert all(master.grad is not None for master in policy.masters.values())


def test_a_snapshot_brings_an_older_adapter_back_for_one_forward(tiny_family):
    policy = load(tiny_family("llama"))
    old, before = policy.snapshot(), logits_of(policy).detach()
    disturb(policy)
    after = logits_of(policy).detach()
    with policy.with_weights(old):
        assert torch.equal(logits_of(policy), before)
    assert torch.equal(logits_of(policy), after)


def test_dropout_acts_on_training_forwards_and_never_on_scores(tiny_family):
    """Scores are compared with the sampler's logprobs, and the sampler has no dropout."""
    plain, dropped = load(tiny_family("llama")), load(tiny_family("llama"), dropout=0.5)
    dropped.load_masters(plain.masters)
    for policy in (plain, dropped):
        disturb(policy)
    with torch.no_grad():
        assert torch.equal(logits_of(plain), logits_of(dropped))
    assert not torch.equal(logits_of(plain), logits_of(dropped))
    assert (plain.has_dropout, dropped.has_dropout) == (False, True)


def test_dropout_draws_the_same_mask_when_activations_are_recomputed(tiny_family):
    gradients = []
    start = load(tiny_family("llama")).snapshot()
    for switch in (False, True):
        policy = load(tiny_family("llama"), dropout=0.5, gradient_checkpointing=switch)
        policy.load_masters(start)
        disturb(policy)
        torch.manual_seed(7)
        logits_of(policy).square().mean().backward()
        gradients.append([master.grad for master in policy.masters.values()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("family", "target", "found"),
    [
        ("llama", "attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("llama", "mlp", {"gate_proj", "up_proj", "down_proj"}),
        ("phi3", "all-linear", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", "attention", {"c_attn", "attn.c_proj"}),
        ("gpt2", "mlp", {"c_fc", "mlp.c_proj"}),
    ],
)
def test_presets_mean_the_modules_of_that_role_in_every_family(tiny_family, family, target, found):
    policy = load(tiny_family(family), target_modules=(target,))
    assert set(policy.adapter_config()["target_modules"]) == found
    assert len(policy.masters) == 3 * 2 * len(found)


def test_modules_the_model_does_not_have_are_refused_with_those_it_has(tiny_family):
    with pytest.raises(AdapterUnavailable, match="q_proj: this model has no such linear module; it has c_attn, c_fc"):
        load(tiny_family("gpt2"))


def test_modules_that_the_chosen_layers_lack_are_refused_with_those_they_have():
    """Layers of hybrid models differ. PEFT ended the program with a traceback."""
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)}) for name in ("in_proj", "q_proj")
    )
    told = "q_proj: this model has no such linear module in --lora-layer-indices 0; it has in_proj"
    with pytest.raises(AdapterUnavailable, match=told):
        inject(module, AdapterOptions(target_modules=("q_proj",), layer_indices="0"))


@pytest.mark.parametrize(("family", "block"), [("llama", "layers.2."), ("gpt2", "h.2.")])
def test_a_layer_filter_puts_adapters_on_those_blocks_only(tiny_family, family, block):
    policy = load(tiny_family(family), target_modules=("attention",), layer_indices="last-1")
    assert policy.masters
    assert all(block in name for name in policy.masters)


def test_a_layer_filter_outside_the_model_names_its_own_flag_and_the_valid_range(tiny_family):
    with pytest.raises(BadLayerFilter, match=r"--lora-layer-indices '3': .* the valid range is 0-2"):
        load(tiny_family("llama"), layer_indices="3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_in_four_bits_trains_its_adapter_and_gives_the_values_it_computes_with(tiny_family, dtype):
    policy = load(tiny_family("llama"), dtype=dtype, quantise="nf4")
    packed = [parameter for parameter in policy.module.parameters() if parameter.dtype == torch.uint8]
    assert len(packed) == 3 * 7
    disturb(policy)
    logits = logits_of(policy)
    logits.float().square().mean().backward()
    policy.collect_gradients()
    assert all(master.grad is not None and master.grad.abs().sum() > 0 for master in policy.masters.values())
    served = AutoModelForCausalLM.from_pretrained(tiny_family("llama"), dtype=policy.dtype)
    with policy.without_adapter():
        alone = logits_of(policy)
    with torch.no_grad():
        served.load_state_dict(policy.base_tensors(policy.dtype))
        torch.testing.assert_close(served(input_ids=TOKENS).logits, alone)
    assert not torch.allclose(alone, logits.detach())


def test_p12_an_adapter_on_the_output_head_is_refused(tiny_family):
    """A server computes logprobs without such an adapter, so trainer and sampler would differ silently."""
    with pytest.raises(AdapterUnavailable, match="lm_head"):
        load(tiny_family("llama"), target_modules=("q_proj", "lm_head"))


def test_p21_training_an_adapter_leaves_its_base_bit_for_bit(tiny_family):
    """Merging and unmerging in half precision would drift away from the server's weights."""
    policy = load(tiny_family("qwen2-tied"), dtype="bfloat16", target_modules=("q_proj", "v_proj"))
    frozen = {name: p for name, p in policy.module.named_parameters() if "lora_" not in name}
    before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
    optimizer = torch.optim.AdamW(policy.masters.values(), lr=0.1)
    for _ in range(3):
        logits_of(policy).float().square().mean().backward()
        policy.collect_gradients()
        optimizer.step()
        optimizer.zero_grad()
        with policy.without_adapter():
            logits_of(policy)
    assert any(bool(master.detach().abs().sum() > 0) for name, master in policy.masters.items() if "lora_B" in name)
    assert all(torch.equal(parameter, before[name]) for name, parameter in frozen.items())


@pytest.mark.parametrize(
    ("family", "targets", "left_out"),
    [
        ("mixtral", ("all-linear",), "mlp.experts.down_proj, mlp.experts.gate_up_proj, mlp.gate.weight"),
        ("mixtral", ("attention",), None),
        ("qwen2", ("all-linear",), None),
    ],
)
def test_the_log_names_what_the_targets_mean_and_an_adapter_cannot_be_put_on(
    tiny_family: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    family: str,
    targets: tuple[str, ...],
    left_out: str | None,
) -> None:
    load(tiny_family(family), target_modules=targets)
    said = [record.message for record in caplog.records if "stay frozen" in record.message]
    assert len(said) == (left_out is not None)
    if left_out is not None:
        assert f"all-linear adapts k_proj, o_proj, q_proj, v_proj; {left_out} take no adapter" in said[0]


def test_the_log_names_what_a_base_in_4_bits_does_not_pack(
    tiny_family: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bitsandbytes")
    for family in ("qwen2", "mixtral"):
        load(tiny_family(family), dtype="bfloat16", quantise="nf4")
    said = [record.message for record in caplog.records if "--load-in-4bit packs" in record.message]
    assert len(said) == 1
    assert "mlp.experts.down_proj, mlp.experts.gate_up_proj" in said[0]


def test_fused_experts_are_refused_as_a_target(tiny_family: Callable[[str], Path]) -> None:
    with pytest.raises(AdapterUnavailable, match=r"gate_up_proj: this model has no such .* take no adapter"):
        load(tiny_family("mixtral"), target_modules=("gate_up_proj",))
