"""A publish to a server of two tensor-parallel workers, each of which receives all weights and loads its part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from example_trainer.errors import PublishFailed
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.testing import config_of
from example_trainer.weights.weight_source import WeightSource

from .test_broadcast import SMALL_BUCKET, agree, shift

pytestmark = pytest.mark.vllm


def workers_memory():
    """Return the files of shared memory of all vLLM workers on this machine's CPU."""
    return set(Path("/dev/shm").glob("vllm_dist_*"))


@pytest.fixture(scope="module")
def server(start_server):
    token = {"ATROPOS_BRIDGE_TOKEN": "known"}
    before = workers_memory()
    started = start_server("--await-policy", "--tensor-parallel-size", "2", environ=token)
    own = workers_memory() - before
    yield started
    started.stop()
    assert own
    assert not own & workers_memory(), "8 MiB are left for each start by vLLM's own end"


@pytest.fixture(scope="module")
def bridge(server):
    config = config_of(
        server.url,
        server.model,
        dtype="float32",
        num_inference_nodes=1,
        inference_urls=[server.url],
        bridge_token="known",
        wait_timeout=120,
        drain_seconds=0,
    )
    made = BroadcastBridge(config, partial(WeightSource, limit_bytes=SMALL_BUCKET), lease_seconds=2)
    made.prepare()
    yield made
    made.close()


def masters_of(bridge):
    return {name: master.detach().clone() for name, master in bridge._policy.masters.items()}


def set_masters(bridge, values):
    with torch.no_grad():
        for name, master in bridge._policy.masters.items():
            master.copy_(values[name])


def test_each_worker_loads_its_part_of_every_version(bridge, server):
    assert server.info()["workers"] == 2
    for version in (1, 2, 3):
        if version > 1:
            shift(bridge._policy, version)
        bridge.publish(version)
        assert agree(bridge, version)


def test_a_transfer_that_breaks_off_leaves_the_old_weights_at_both_workers(bridge, monkeypatch):
    version = bridge.highest_version()
    sent = []
    broadcast = BroadcastGroup._broadcast

    def breaking(group, tensor):
        sent.append(tensor)
        if len(sent) > 2:
            raise RuntimeError("the cable is pulled")
        broadcast(group, tensor)

    before = masters_of(bridge)
    shift(bridge._policy, 9)
    after = masters_of(bridge)
    monkeypatch.setattr(BroadcastGroup, "_broadcast", breaking)
    with pytest.raises(PublishFailed, match="the cable is pulled"):
        bridge.publish(version + 1)
    monkeypatch.undo()
    set_masters(bridge, before)
    assert agree(bridge, version)
    set_masters(bridge, after)
    bridge.publish(version + 1)
    assert agree(bridge, version + 1)
