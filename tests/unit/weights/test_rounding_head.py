"""Each bridge warns of a server whose output head rounds its logits, as soon as that server is known."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from example_trainer.weights import broadcast
from example_trainer.weights.adapter_target import ServerIdentity
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.served_model import ServedBase
from example_trainer.weights.testing import FakeServer, config_of

URL = "http://127.0.0.1:9"
POLICY = SimpleNamespace(dtype=torch.bfloat16, has_adapter=False)


def reach_by_shared(head_dtype, tmp_path, monkeypatch, shared):
    told = FakeServer._info

    async def info(self, body):
        return await told(self, body) | {"head_dtype": head_dtype}

    monkeypatch.setattr(FakeServer, "_info", info)
    _, bridge = shared("qwen2", dtype="bfloat16", policy={"dtype": "bfloat16"})
    bridge.prepare()


def reach_by_broadcast(head_dtype, tmp_path, monkeypatch, _):
    monkeypatch.setattr(broadcast, "load_policy", lambda _: POLICY)
    client = SimpleNamespace(url=URL, close=lambda: None)
    told = SimpleNamespace(dtype="bfloat16", head_dtype=head_dtype)
    monkeypatch.setattr(broadcast, "connect_server", lambda *_: (client, told))
    bridge = BroadcastBridge(config_of(URL, "m", num_inference_nodes=1), make_source=lambda _: None)
    bridge.prepare()
    bridge.close()


def reach_by_adapter(head_dtype, tmp_path, monkeypatch, _):
    bridge = LoraOnlyBridge(config_of(URL, "m", weight_bridge_mode="lora_only", run_dir=tmp_path))
    found = ServerIdentity("boot", None, 64, dtype="bfloat16", head_dtype=head_dtype)
    bridge._connect = lambda: SimpleNamespace(identify=lambda: found)
    bridge.connect(POLICY, ServedBase("m"))


def reach_by_restart(head_dtype, tmp_path, monkeypatch, _):
    bridge = RestartBridge(config_of(URL, "m", weight_bridge_mode="none", run_dir=tmp_path))
    bridge._policy, bridge._manager = POLICY, SimpleNamespace(url=URL, prepare_standby=lambda: None)
    bridge._write = lambda *_: tmp_path / "policy-v1"
    bridge._serve = lambda *_: (SimpleNamespace(dtype="bfloat16", head_dtype=head_dtype), 0.0)
    monkeypatch.setattr(bridge, "_prove_or_put_off", lambda *_: None)
    for version in (1, 2):
        bridge.publish(version)


@pytest.mark.parametrize("head_dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize(
    "reach",
    [reach_by_shared, reach_by_broadcast, reach_by_adapter, reach_by_restart],
    ids=["shared_vllm", "broadcast", "lora_only", "none"],
)
def test_a_bridge_warns_once_of_a_server_whose_head_does_not_say_that_it_computes_in_fp32(
    reach, head_dtype, tmp_path, monkeypatch, caplog, shared
):
    with caplog.at_level(logging.WARNING):
        reach(head_dtype, tmp_path, monkeypatch, shared)
    told = [record.getMessage() for record in caplog.records if "output head" in record.getMessage()]
    assert len(told) == (head_dtype != "float32")
    if told:
        assert ("rounds the logits of its output head to bfloat16" in told[0]) is (head_dtype == "bfloat16")
        assert "start it with --head-dtype float32" in told[0]
