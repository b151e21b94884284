"""The policy: the weights of the forward, those of the optimizer, and those in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from example_trainer.errors import BadLayerFilter, CheckpointError, ModelNotFound, NonfiniteWeights
from example_trainer.model import load_policy
from example_trainer.modeling.activation_offloading import CannotOffload, offload_layer_inputs
from example_trainer.modeling.loading import PolicyOptions, _for_training
from example_trainer.testing import make_tiny_model

TOKENS = torch.arange(3, 43).view(2, 20)


def options_for(path, **changes):
    return PolicyOptions(**{"model_name": str(path), "dtype": "float32", "device": "cpu", **changes})


def loss_of(policy):
    with policy.autocast():
        logits = policy.module(input_ids=TOKENS).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())


def views_of(policy, dtype):
    return {name: master.detach().to(dtype).clone() for name, master in policy.masters.items()}


def test_masters_are_fp32_while_the_forward_computes_in_the_served_dtype(tiny_family):
    policy = load_policy(options_for(tiny_family("llama"), dtype="bfloat16"))
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    with policy.autocast():
        assert policy.module(input_ids=TOKENS).logits.dtype == torch.bfloat16


def test_master_weights_none_steps_the_served_dtype_itself(tiny_family):
    policy = load_policy(options_for(tiny_family("llama"), dtype="bfloat16", master_weights="none"))
    assert {master.dtype for master in policy.masters.values()} == {torch.bfloat16}


def test_tied_weights_are_one_master_and_stored_once(tiny_family):
    policy = load_policy(options_for(tiny_family("qwen2-tied")))
    assert "lm_head.weight" not in policy.masters
    assert "lm_head.weight" not in policy.checkpoint_tensors()
    assert policy.module.lm_head.weight is policy.masters["model.embed_tokens.weight"]


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "llama", "phi3", "gpt2", "mixtral"])
def test_checkpoint_tensors_are_those_of_the_checkpoint_loaded(tiny_family, family):
    stored = load_file(tiny_family(family) / "model.safetensors")
    tensors = load_policy(options_for(tiny_family(family))).checkpoint_tensors()
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors.values())


def test_checkpoint_tensors_come_from_the_masters_when_the_forward_runs_on_views(tiny_family):
    policy = load_policy(options_for(tiny_family("llama"), dtype="bfloat16"))
    policy.attach(views_of(policy, torch.bfloat16), forwards_from_masters=False)
    tensors = policy.checkpoint_tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert {tensor.dtype for tensor in policy.checkpoint_tensors(torch.bfloat16).values()} == {torch.bfloat16}


def test_the_bias_by_which_a_router_chooses_experts_is_stored_as_the_forward_adds_it(tmp_path):
    """In 16 bits the server would choose other experts than the trainer, which keeps it in fp32."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes, num_experts_per_tok=2))
    bias = next(name for name, _ in made.named_buffers() if name.endswith("e_score_correction_bias"))
    made.get_buffer(bias).copy_(torch.tensor([0.1, 0.2, 0.3, 0.7]))
    made.save_pretrained(tmp_path)
    policy = load_policy(options_for(tmp_path, dtype="bfloat16"))
    served = policy.checkpoint_tensors(torch.bfloat16)
    assert torch.equal(served[bias], policy.module.get_buffer(bias))
    assert served["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_gradients_of_views_add_up_in_the_masters(tiny_family):
    plain = load_policy(options_for(tiny_family("llama")))
    (loss_of(plain) / 2).backward()
    (loss_of(plain) / 2).backward()
    viewed = load_policy(options_for(tiny_family("llama")))
    viewed.attach(views_of(viewed, torch.float32), forwards_from_masters=False)
    for _ in range(2):
        (loss_of(viewed) / 2).backward()
        viewed.collect_gradients()
    assert all(parameter.grad is None for parameter in viewed.module.parameters())
    for name, master in plain.masters.items():
        torch.testing.assert_close(viewed.masters[name].grad, master.grad, rtol=0, atol=0)


def test_gradients_of_bf16_views_accumulate_in_fp32(tiny_family):
    policy = load_policy(options_for(tiny_family("llama"), dtype="bfloat16"))
    policy.attach(views_of(policy, torch.bfloat16), forwards_from_masters=False)
    weight = policy.module.lm_head.weight
    for _ in range(400):  # in bf16 a sum stops growing at 256 times its parts
        weight.grad = torch.ones_like(weight)
        policy.collect_gradients()
    assert policy.masters["lm_head.weight"].grad.dtype == torch.float32
    assert policy.masters["lm_head.weight"].grad.unique().tolist() == [400.0]


def test_the_forward_follows_the_masters_in_the_served_dtype(tiny_family):
    policy = load_policy(options_for(tiny_family("llama"), dtype="bfloat16"))
    before = loss_of(policy).item()
    loss_of(policy).backward()
    with torch.no_grad():
        for master in policy.masters.values():
            master.sub_(0.5 * master.grad)
    assert loss_of(policy).item() < before
    assert policy.stale_weights() == []


def test_a_snapshot_brings_back_older_weights_for_one_forward_and_leaves_the_masters_alone(tiny_family):
    policy = load_policy(options_for(tiny_family("qwen2-tied")))
    before = loss_of(policy).item()
    old = policy.snapshot()
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1.5)
    after = loss_of(policy).item()
    kept = {name: master.data_ptr() for name, master in policy.masters.items()}
    with policy.with_weights(old):
        again = loss_of(policy)
        assert not again.requires_grad
        assert again.item() == before
    assert loss_of(policy).item() == after != before
    assert {name: master.data_ptr() for name, master in policy.masters.items()} == kept


def test_loading_masters_restores_a_checkpoint_and_names_what_is_missing(tiny_family):
    policy = load_policy(options_for(tiny_family("llama")))
    saved = {name: tensor.clone() for name, tensor in policy.checkpoint_tensors().items()}
    with torch.no_grad():
        for master in policy.masters.values():
            master.zero_()
    policy.load_masters(saved)
    assert all(torch.equal(policy.masters[name], tensor) for name, tensor in saved.items())
    del saved["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        policy.load_masters(saved)


@pytest.mark.parametrize(("family", "block"), [("llama", "model.layers.1."), ("gpt2", "transformer.h.1.")])
def test_a_layer_filter_trains_those_blocks_only(tiny_family, family, block):
    policy = load_policy(options_for(tiny_family(family), train_layer_indices="1"))
    assert policy.masters
    assert all(name.startswith(block) for name in policy.masters)
    loss_of(policy).backward()
    grown = {name for name, parameter in policy.module.named_parameters() if parameter.grad is not None}
    assert grown == {name for name in policy.parameter_names if name.startswith(block)}


@pytest.mark.parametrize("text", ["3", "0-3", "2-1", "all"])
def test_a_layer_filter_outside_the_model_is_refused_with_the_valid_range(tiny_family, text):
    with pytest.raises(BadLayerFilter, match=r"0-2|20-31"):
        load_policy(options_for(tiny_family("llama"), train_layer_indices=text))


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(ModelNotFound, match="--model-name") as caught:
        load_policy(options_for(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


def test_weights_that_were_copied_in_part_are_one_clear_line(tmp_path):
    (file,) = make_tiny_model(tmp_path).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelNotFound, match=f"--model-name {tmp_path}: no causal .* from this directory") as caught:
        load_policy(options_for(tmp_path))
    assert "\n" not in str(caught.value)


def test_dropout_of_the_checkpoint_is_off_in_training(tiny_family):
    policy = load_policy(options_for(tiny_family("gpt2")))
    assert policy.module.training
    assert loss_of(policy).item() == loss_of(policy).item()


@pytest.mark.parametrize("kind", ["biogpt", "emu3"], ids=["names that end otherwise", "a config within another"])
def test_dropout_is_off_whatever_a_configuration_calls_it(kind):
    stored = AutoConfig.for_model(kind)
    loaded = _for_training(stored).get_text_config()
    rates = {name: value for name, value in vars(stored.get_text_config()).items() if "drop" in name and value}
    assert rates
    assert not any(getattr(loaded, name) for name in rates)


def test_the_jitter_of_a_mixture_s_routers_is_off_in_training():
    stored = AutoConfig.for_model("mixtral", router_jitter_noise=0.1)
    assert _for_training(stored).router_jitter_noise == 0.0
    assert stored.router_jitter_noise == 0.1, "written checkpoints keep it"


def test_gradient_checkpointing_gives_the_same_gradients(tiny_family):
    plain, checkpointed = (
        load_policy(options_for(tiny_family("llama"), gradient_checkpointing=switch)) for switch in (False, True)
    )
    loss_of(plain).backward()
    loss_of(checkpointed).backward()
    for name, master in plain.masters.items():
        torch.testing.assert_close(checkpointed.masters[name].grad, master.grad)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layer_inputs_kept_elsewhere_give_the_same_gradients(tiny_family, family):
    plain, offloaded = (load_policy(options_for(tiny_family(family), gradient_checkpointing=True)) for _ in range(2))
    away, back = [], []
    offload_layer_inputs(
        offloaded.module,
        pack=lambda kept: away.append(kept.shape) or kept.detach().clone(),
        unpack=lambda copy: back.append(copy.shape) or copy.clone(),
    )
    loss_of(plain).backward()
    loss_of(offloaded).backward()
    for name, master in plain.masters.items():
        assert torch.equal(offloaded.masters[name].grad, master.grad)
    hidden = plain.module.config.hidden_size
    assert sorted(away) == sorted(back)
    assert [shape for shape in away if len(shape) == 3 and shape[-1] == hidden], "the input of each layer"
    assert len(away) == plain.module.config.num_hidden_layers


def test_a_model_without_layers_that_are_checkpointed_cannot_offload_their_inputs():
    with pytest.raises(CannotOffload, match="--activation-offloading: Linear has no layers"):
        offload_layer_inputs(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_model_with_weights_that_are_not_finite_is_refused_before_it_is_trained(tmp_path, value):
    model = make_tiny_model(tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonfiniteWeights, match=rf"--model-name .*: {name} has values that are NaN or infinite"):
        load_policy(options_for(model))
