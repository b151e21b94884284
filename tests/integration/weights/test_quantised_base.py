"""`--load-in-4bit` with a real vLLM: the server computes with the 4-bit base's values, which each publish proves.

`lora_only` has one server; `lora_restart` starts one for each publish, so it runs with ATROPOS_RESTARTS=10 only.
"""

from __future__ import annotations

import os

import pytest
import torch

from example_trainer.errors import ProofFailed
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.processes.ports import free_port
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights import logprob_parity
from example_trainer.weights.logprob_parity import TOLERANCES
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.testing import config_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
pytest.importorskip("bitsandbytes")

RESTARTS = int(os.environ.get("ATROPOS_RESTARTS", "1"))
TARGETS = {"r": 8, "alpha": 16, "target_modules": ("all-linear",)}
ADAPTER = {
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ["all-linear"],
    "load_in_4bit": True,
}


def shift(policy, seed):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in policy.masters.items():
            master.copy_(torch.randn(master.shape, generator=noise) * (0.1 if "lora_A" in name else 0.05))


@pytest.fixture
def proofs(monkeypatch):
    """The agreements that the proofs found."""
    found, compare = [], logprob_parity.compare

    def note(*arguments):
        found.append(compare(*arguments))
        return found[-1]

    monkeypatch.setattr(logprob_parity, "compare", note)
    return found


def check(proofs, publishes):
    worst = TOLERANCES[torch.float32]
    assert len(proofs) == publishes
    assert all(proof.difference.within(worst) for proof in proofs), proofs


@pytest.fixture
def bridge(tiny_qwen2, tmp_path):
    usual = {"weight_bridge_mode": "lora_only", "run_dir": tmp_path, "dtype": "float32", "max_model_len": 2048}
    usual |= {"wait_timeout": 240, "sync_check": "every", "load_in_4bit": True} | ADAPTER
    config = config_of(f"http://127.0.0.1:{free_port()}", tiny_qwen2, **usual)
    made = LoraOnlyBridge(config, vllm=VllmOptions.of(config).with_settings(kv_cache_memory_bytes=64 << 20))
    yield made
    made.close()


def test_in_lora_only_every_publish_is_proven_on_a_base_in_four_bits(bridge, proofs, tiny_qwen2):
    policy = bridge.prepare()
    for version in range(1, 5):
        shift(policy, version)
        bridge.publish(version)
    check(proofs, publishes=4)
    policy_of_the_model = load_policy(
        PolicyOptions(model_name=str(tiny_qwen2), dtype="float32", adapter=AdapterOptions(**TARGETS))
    )
    shift(policy_of_the_model, 4)
    bridge._policy = policy_of_the_model
    with pytest.raises(ProofFailed, match="disagree on version 5"):
        bridge.publish(5)
    assert proofs[-1].difference.maximum > 100 * TOLERANCES[torch.float32].maximum, "the two bases differ by far"


@pytest.mark.skipif(RESTARTS == 1, reason="a start of vLLM for each publish; ATROPOS_RESTARTS=10 runs it")
def test_in_lora_restart_every_publish_is_proven_on_a_base_in_four_bits(bridge_for, proofs, tmp_path):
    bridge = bridge_for(weight_bridge_mode="lora_restart", sync_check="every", load_in_4bit=True, **ADAPTER)
    policy = bridge.prepare()
    for version in range(1, 4):
        shift(policy, version)
        bridge.publish(version)
    check(proofs, publishes=3)
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["base", "policy-v3"]
