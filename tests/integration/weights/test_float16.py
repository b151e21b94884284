"""Training in float16 with a real vLLM, in each mode: five steps on its samples, and a proof of each publish.

vLLM starts once per mode. `shared_vllm` runs always, the others with `ATROPOS_FAMILIES=all`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from atropos_api.wire import Batch, Group
from example_trainer.config import TrainingConfig
from example_trainer.group_sequences import MASKED, PLACEHOLDER_LOGPROB
from example_trainer.step.train_step import make_train_step
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.logprob_parity import TOLERANCES
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.testing import config_of

pytestmark = pytest.mark.vllm

long_form = pytest.mark.skipif(
    os.environ.get("ATROPOS_FAMILIES") != "all", reason="a start of vLLM each; ATROPOS_FAMILIES=all runs it"
)
STEPS = 5
EVERY_PUBLISH = {"sync_check": "every"}


@pytest.fixture(scope="module")
def half_model(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, stored in float16."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float16).save_pretrained(directory)
    for path in tiny_qwen2.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory


def trainer(model, directory, port, mode, **changes):
    """Return the configuration of a trainer, and the options of its own server."""
    usual = {"weight_bridge_mode": mode, "run_dir": directory, "dtype": "auto", "device": "cpu", "wait_timeout": 240}
    url = f"http://127.0.0.1:{port}"
    config = config_of(url, model, **usual | {"max_model_len": 1024} | EVERY_PUBLISH | changes)
    return config, VllmOptions.of(config).with_settings(kv_cache_memory_bytes=64 << 20)


def sampled_batch(client, number, version):
    """Return four groups of the server's own samples, rewarded for even tokens."""
    groups = []
    for seed in range(4):
        prompt = [(7 * seed + at) % 300 for at in range(8)]
        request = {"prompt": {"prompt_token_ids": prompt}, "n": 4, "max_tokens": 12, "temperature": 1.0, "logprobs": 0}
        answer = client.generate(request | {"ignore_eos": True, "compact": True})
        rows = answer["token_ids"]
        groups.append(
            Group(
                tokens=[prompt + row for row in rows],
                masks=[[MASKED] * len(prompt) + row for row in rows],
                scores=[sum(token % 2 == 0 for token in row) / len(row) for row in rows],
                inference_logprobs=[[PLACEHOLDER_LOGPROB] * len(prompt) + logs for logs in answer["logprobs"]],
                generation_params={"temperature": 1.0},
                policy_versions=[[(len(prompt), len(prompt) + len(row), version)] for row in rows],
            )
        )
    return Batch(number=number, run_id="r", groups=groups)


def train_five_steps(bridge, mode, client_of):
    """Train on the server's samples; publish and prove each step."""
    policy = bridge.prepare()
    settings = {"model_name": policy.tokenizer_name, "dtype": "auto", "weight_bridge_mode": mode, "optimizer": "adamw"}
    step = make_train_step(TrainingConfig.model_validate(settings | {"lr": 1e-3, "seq_len": 64}), policy)
    bridge.publish(1)
    found = []
    for version in range(1, STEPS + 1):
        before = policy.snapshot()
        step.alignment.published(version)
        client = client_of(bridge)
        found.append(step.train(step.prepare(sampled_batch(client, version, version))))
        assert any(not torch.equal(before[name], weight) for name, weight in policy.snapshot().items())
        bridge.publish(version + 1)
    assert policy.dtype == torch.float16
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    for metrics in found:
        assert metrics["train/skipped_steps"] == metrics["train/nonfinite"] == 0.0
        assert metrics["alignment/diff_abs_mean"] <= bridge._check.limit.mean < TOLERANCES[torch.bfloat16].mean


def test_shared_tensors_in_float16_are_trained_and_proven(half_model, restartable_server, bridge_to):
    restartable_server.model = half_model
    restartable_server.start("--max-model-len", "1024")
    bridge = bridge_to(restartable_server, dtype="auto", forward_weights="views", **EVERY_PUBLISH)
    train_five_steps(bridge, "shared_vllm", lambda bridge: bridge._attached.client)
    assert bridge._attached.client.info().head_dtype == "float32", "as the trainer's head"
    assert {view.dtype for view in bridge._policy.served.values()} == {torch.float16}


@long_form
def test_adapters_over_a_float16_base_are_trained_and_proven(half_model, tmp_path, neighbours):
    adapter = {"lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    config, vllm = trainer(half_model, tmp_path, neighbours[0], "lora_only", **adapter)
    bridge = LoraOnlyBridge(config, vllm=vllm)
    try:
        train_five_steps(bridge, "lora_only", lambda bridge: bridge._server)
    finally:
        bridge.close()


@long_form
def test_checkpoints_in_float16_are_read_by_a_running_server_and_proven(half_model, tmp_path, neighbours):
    bridge = RestartBridge(*trainer(half_model, tmp_path, neighbours[0], "none", restart_method="reload"))
    try:
        train_five_steps(bridge, "none", lambda bridge: ServerClient(bridge._manager.url, bridge._manager.token))
    finally:
        bridge.close()
