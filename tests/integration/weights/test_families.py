"""Model families attach by the traced map alone and compute the server's logprobs after each of several publishes.

`ATROPOS_FAMILIES=all` runs every family; the default is the one that differs most from vLLM's tensors.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from example_trainer.weights.logprob_parity import _checked, _request, compare, probe_prompts

pytestmark = pytest.mark.vllm

SIZES = {
    "vocab_size": 300,  # not a multiple of 64: vLLM pads the vocabulary
    "hidden_size": 128,  # 32 a head, the least that vLLM attends with on a CPU
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
FAMILIES = {
    "phi3": ("Phi3Config", {"tie_word_embeddings": False}),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 32}),
}
EVERYWHERE = tuple(FAMILIES) if os.environ.get("ATROPOS_FAMILIES") == "all" else tuple(FAMILIES)[:1]


@pytest.fixture
def model_of(tiny_qwen2, tmp_path):
    """A function that writes a random model of a family to a directory."""

    def make(family):
        import transformers

        name, settings = FAMILIES[family]
        torch.manual_seed(0)
        config = getattr(transformers, name)(**SIZES, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4.0)  # sharper than an untrained model, so that versions differ clearly
        directory = tmp_path / family
        model.save_pretrained(directory)
        for path in tiny_qwen2.glob("tokenizer*"):
            shutil.copy(path, directory)
        return directory

    return make


@pytest.mark.parametrize("family", EVERYWHERE)
def test_r5_a_family_is_mapped_whole_and_agrees_after_every_publish(family, model_of, start_server, bridge_to):
    server = start_server("--share-weights", "--max-model-len", "512", model=model_of(family))
    bridge = bridge_to(server)
    policy = bridge.prepare()
    assert set(policy.served) == set(policy.masters), "every trained tensor is a view into the server's"
    bridge.publish(1)
    for version in (2, 3):
        old = policy.snapshot()
        with torch.no_grad():
            noise = torch.Generator().manual_seed(version)
            for master in policy.masters.values():
                master.mul_(1 + 0.3 * torch.randn(master.shape, generator=noise))
        bridge.publish(version)
        samples = _samples(bridge, version)
        agreement = compare(policy, samples)
        assert agreement.difference.within(agreement.limit), agreement
        with policy.with_weights(old):
            assert not compare(policy, samples).difference.within(agreement.limit), "otherwise agreement proves nothing"
    bridge.close()
    server.stop()


def _samples(bridge, version):
    attachment = bridge._attached
    return [
        _checked(prompt, attachment.client.generate(_request(prompt)), version=version, boot_id=attachment.boot_id)
        for prompt in probe_prompts(SIZES["vocab_size"], attachment.info.max_model_len)
    ]
