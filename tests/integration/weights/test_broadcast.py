"""One publish, two servers: both move to a version or neither does, and both compute what the trainer does."""

from __future__ import annotations

import pytest
import torch

from example_trainer.errors import PublishFailed
from example_trainer.model import PolicyOptions
from example_trainer.weights.broadcast import BroadcastBridge, BroadcastOptions
from example_trainer.weights.errors import ServerRefused
from example_trainer.weights.proof import _checked, _request, compare, probe_prompts

from .load import Load

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def servers(start_server):
    return [start_server("--await-policy", environ={"ATROPOS_BRIDGE_TOKEN": "known"}) for _ in range(2)]


@pytest.fixture(scope="module")
def bridge(servers):
    options = BroadcastOptions(
        policy=PolicyOptions(model_name=str(servers[0].model), dtype="float32"),
        server_urls=[server.url for server in servers],
        bridge_token="known",
        wait_timeout_seconds=60,
    )
    made = BroadcastBridge(options)
    made.prepare()
    yield made
    made.close()


def shift(policy, seed):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1 + 0.1 * torch.randn(master.shape, generator=noise))


def agree(bridge, version):
    """Whether every server samples from just what the trainer computes with."""
    for client in bridge._clients:
        boot = client.info().boot_id
        samples = [
            _checked(prompt, client.generate(_request(prompt)), version=version, boot_id=boot)
            for prompt in probe_prompts(300, 2048)[2:5]
        ]
        agreement = compare(bridge._policy, samples)
        if not agreement.difference.within(agreement.limit):
            return False
    return True


def test_r27_servers_that_await_weights_serve_nothing_before_the_first_broadcast(bridge, servers):
    assert [server.post("/generate", {"prompt": [1], "max_tokens": 1}).status_code for server in servers] == [503, 503]
    bridge.publish(1)
    assert agree(bridge, 1)


def test_r5_both_servers_move_together_under_load_and_agree_with_the_trainer(bridge, servers):
    with Load(servers[0].url, output_tokens=150) as one, Load(servers[1].url, output_tokens=150) as other:
        for version in (2, 3):
            shift(bridge._policy, version)
            bridge.publish(version)
            assert [server.version for server in servers] == [version, version]
            assert agree(bridge, version)
    assert one.errors == other.errors == []
    shift(bridge._policy, 4)
    assert bridge.notify_update().version == 4
    assert agree(bridge, 4)


def test_where_one_server_cannot_take_the_weights_neither_moves(bridge, servers, monkeypatch):
    before = bridge.highest_version()
    old = bridge._policy.snapshot()
    client = bridge._clients[1]

    def refuse(*_, **__):
        raise ServerRefused("no memory left", 503)

    shift(bridge._policy, 9)
    monkeypatch.setattr(type(client), "begin_publish", fails_for(client, type(client).begin_publish, refuse))
    with pytest.raises(PublishFailed, match="no memory left"):
        bridge.publish(before + 1)
    monkeypatch.undo()
    assert [server.version for server in servers] == [before, before]
    new = bridge._policy.snapshot()
    bridge._policy.load_masters(old)
    assert agree(bridge, before), "both still compute with the old weights"
    bridge._policy.load_masters(new)
    bridge.publish(before + 1)
    assert agree(bridge, before + 1)


def fails_for(one, call, refuse):
    return lambda client, **fields: refuse() if client is one else call(client, **fields)
