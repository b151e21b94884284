"""Modes `none` and `lora_restart` with a real vLLM: no rollout is lost when one server replaces another."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import save_file

from example_trainer import vllm_manager
from example_trainer.errors import PublishFailed, ServerUnavailable
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.logprob_parity import _checked, _request, compare, probe_prompts

from .lost_exchange import losing
from .rollout_load import RolloutLoad, differences

pytestmark = pytest.mark.vllm

logger = logging.getLogger(__name__)

RESTARTS = int(os.environ.get("ATROPOS_RESTARTS", "1"))
"""Restarts under load in each mode; the long form has ten, and `lora_restart` runs only there."""
LOAD = {"workers": 4} if RESTARTS > 1 else {"workers": 2, "pause_seconds": 0.2}
DECOY = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def decoy(neighbours):
    """Start a foreign process that is named like vLLM, on the port next to the server's."""
    command = ["-c", DECOY, str(neighbours[1]), "vllm", "serve", "example_trainer.vllm_api_server"]
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def shift(policy, seed):
    """Change the weights clearly, and keep their size over any number of calls."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1 + 0.3 * torch.randn(master.shape, generator=noise)).div_(1.09**0.5)


def agrees(bridge, version):
    """Return True if the server samples from this version now, and the trainer computes the same logprobs."""
    client = ServerClient(bridge._manager.url)
    info = client.info()
    prompt = probe_prompts(300, 512)[3]
    answer = client.generate(_request(prompt))
    client.close()
    agreement = compare(bridge._policy, [_checked(prompt, answer, version=version, boot_id=info.boot_id)])
    return agreement.difference.within(agreement.limit)


@pytest.mark.timeout(300 + 60 * RESTARTS)
def test_no_rollout_is_lost_when_a_new_server_starts_next_to_the_old_one_and_no_other_process_is_harmed(
    bridge_for, decoy, tmp_path, monkeypatch
):
    bridge = bridge_for()
    policy = bridge.prepare()
    version = 4
    (tmp_path / "served/.policy-v3.part").mkdir(parents=True)  # of a trainer that was killed
    publish_to_a_server_that_dies_while_it_is_proven(bridge, version)
    first, weights = bridge._manager.pid, {version: policy.snapshot()}
    with RolloutLoad(bridge._manager.url, **LOAD) as load:
        for _ in range(RESTARTS):
            shift(policy, version)
            version += 1
            report = bridge.publish(version)
            weights[version] = policy.snapshot()
            assert report.fence_seconds < report.seconds / 4, "the old one ends, then the new one answers"
            assert agrees(bridge, version)
            assert bridge._proven, "the delayed proof was made later"
    assert load.errors == []
    assert len(load.samples) == load.asked
    assert load.versions() >= {4, version - 1}
    assert all(len(sample.versions) == 1 for sample in load.samples), "each rollout has one version"
    assert differences(policy, weights, load).max() <= 1e-4
    assert load.longest_silence_seconds < report.seconds / 2, "no step waited for the start of the new server"
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["policy", f"policy-v{version}"]
    assert decoy.poll() is None
    assert not psutil.pid_exists(first)
    assert not bridge.needs_publish()
    check_reading_in_place(bridge, policy, version, tmp_path, monkeypatch)


def publish_to_a_server_that_dies_while_it_is_proven(bridge, version):
    """Check that `needs_publish` reports it soon and the run goes on; here the server only looks dead."""

    def prove(*_):
        raise ServerUnavailable("it is gone")

    bridge._prove = prove
    bridge.publish(version)
    del bridge._prove
    assert not bridge._proven


def check_reading_in_place(bridge, policy, version, tmp_path, monkeypatch):
    """Check `--restart-method reload` under load: the process stays, and serves no unreadable checkpoint."""
    bridge._config = bridge._config.model_copy(update={"restart_method": "reload"})
    pid = bridge._manager.pid
    with RolloutLoad(bridge._manager.url, output_tokens=200) as load:
        for following in (version + 1, version + 2):
            shift(policy, following)
            with losing(monkeypatch, "reload", "answer"):
                bridge.publish(following)
            assert agrees(bridge, following)
    assert bridge._manager.pid == pid
    assert load.errors == []
    assert len(load.samples) == load.asked
    client = ServerClient(bridge._manager.url, bridge._manager.token)
    check_mistyped_paths(client, tmp_path)
    zeros = {name: torch.zeros(master.shape) for name, master in policy.masters.items()}
    norm, fused = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
    for tensors, said in (
        ({norm: zeros[norm]}, "of the model's parameters are not in it"),
        ({name: tensor for name, tensor in zeros.items() if name != fused}, f"not in it: {fused}"),
        ({norm: zeros[norm], "more": torch.zeros(1)}, "vLLM cannot read"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        refused = client._http.post("/bridge/reload", json={"path": str(tmp_path), "version": 99})
        assert (refused.status_code, said in refused.json()["detail"]) == (422, True)
        assert client.info().torn, "the server's weights are now unknown"
    assert client._http.post("/generate", json={"prompt": [1]}).status_code == 503
    client.close()


def check_mistyped_paths(client, tmp_path):
    """Check that they are refused before anything is overwritten, and the weights are still served."""
    other, cut = tmp_path / "other", tmp_path / "cut"
    for directory in (other, cut):
        directory.mkdir()
        save_file({"model.norm.weight": torch.zeros(7)}, directory / "model.safetensors")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-4])
    served = client.info().policy_version
    for path, said in (
        (tmp_path / "nowhere", "is not a directory"),
        (tmp_path, "holds neither"),
        (other, "another model: its model.norm.weight has shape [7]"),
        (cut, "it is truncated"),
        ("\0", "is not a directory"),
    ):
        refused = client._http.post("/bridge/reload", json={"path": str(path), "version": 99})
        assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (422, "bad-checkpoint")
        assert said in refused.json()["detail"]
    assert client._http.post("/bridge/reload", json={"path": str(other), "version": 2**70}).status_code == 422
    assert (client.info().torn, client.info().policy_version) == (False, served)
    assert client._http.post("/generate", json={"prompt": [1], "max_tokens": 1}).status_code == 200


@pytest.mark.skipif(RESTARTS == 1, reason="ATROPOS_RESTARTS=10 runs it, which takes minutes")
def test_lora_restart_loses_no_rollout_either_where_one_server_has_to_end_before_the_next_starts(
    bridge_for, monkeypatch
):
    monkeypatch.setattr(vllm_manager, "has_room", lambda *_, **__: False)
    adapter = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    bridge = bridge_for(weight_bridge_mode="lora_restart", **adapter)
    policy = bridge.prepare()
    bridge.publish(1)
    with RolloutLoad(bridge._manager.url, **LOAD) as load:
        for version in range(2, RESTARTS + 2):
            with torch.no_grad():
                for master in policy.masters.values():
                    master.add_(0.05 * torch.randn(master.shape))
            report = bridge.publish(version)
            assert agrees(bridge, version)
            assert 0 < report.fence_seconds <= report.seconds
            logger.info("%d rollouts, %.2f s without a server", load.asked, report.fence_seconds)
    assert load.errors == []
    assert len(load.samples) == load.asked
    assert load.versions() == set(range(1, RESTARTS + 2))


def test_a_server_that_does_not_start_stops_the_run_with_its_log(bridge_for, tmp_path):
    bridge = bridge_for()
    bridge.prepare()
    (tmp_path / "nowhere").mkdir()
    bridge._write = lambda *_: tmp_path / "nowhere"
    with pytest.raises(PublishFailed, match=r"(?s)version 1 is not served.*holds no config.json"):
        bridge.publish(1)
