"""Mode `none` with a real vLLM: each publish is a checkpoint and a start of the server, proven once."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch

from example_trainer.model import PolicyOptions
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights.proof import _checked, _request, compare, probe_prompts
from example_trainer.weights.restart import RestartBridge, RestartOptions
from example_trainer.weights.server_client import ServerClient

pytestmark = pytest.mark.vllm


def test_a_restart_serves_the_new_weights_under_the_new_version_and_leaves_nothing(tiny_qwen2, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    vllm = VllmOptions(
        port=port,
        log_path=tmp_path / "logs" / "vllm.log",
        served_model_name="policy",
        tokenizer=str(tiny_qwen2),
        max_model_len=4096,
        extra_arguments=("--kv-cache-memory-bytes", str(64 << 20)),
    )
    policy_options = PolicyOptions(model_name=str(tiny_qwen2), dtype="float32")
    bridge = RestartBridge(RestartOptions(policy=policy_options, vllm=vllm, weights_dir=tmp_path / "served"))
    before = set(psutil.Process().children(recursive=True))
    try:
        policy = bridge.prepare()
        assert bridge.publish(4).version == 4
        with torch.no_grad():
            for master in policy.masters.values():
                master.mul_(1 + 0.3 * torch.randn_like(master))
        report = bridge.publish(5)
        assert 0 < report.fence_seconds <= report.seconds
        assert [path.name for path in (tmp_path / "served").iterdir()] == ["policy-v5"]
        client = ServerClient(bridge._manager.url)
        info = client.info()
        prompt = probe_prompts(300, 512)[3]
        answer = client.generate(_request(prompt))
        agreement = compare(policy, [_checked(prompt, answer, version=5, boot_id=info.boot_id)])
        assert agreement.difference.within(agreement.limit)
        client.close()
        assert not bridge.needs_publish()
    finally:
        bridge.close()
    assert set(psutil.Process().children(recursive=True)) <= before
