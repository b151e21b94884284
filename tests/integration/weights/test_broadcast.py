"""A publish to two servers: both move to the version or neither does, whatever breaks on the way."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from example_trainer.errors import PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.processes.ports import free_port
from example_trainer.weight_protocol.broadcast_group import TIMEOUT_SECONDS, BroadcastGroup
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.logprob_parity import _checked, _request, compare, probe_prompts
from example_trainer.weights.testing import config_of
from example_trainer.weights.weight_source import WeightSource

from .lost_exchange import losing

pytestmark = pytest.mark.vllm

MAX_ERROR, MEAN_ERROR = 1e-4, 5e-6
SMALL_BUCKET = 1 << 14
"""Bucket size in bytes: the tiny model takes more than five, so that a transfer can break off between two."""

# A server whose behaviour is in the given file; with an empty file it behaves normally.
FAULTY = """
import sys
from pathlib import Path
from example_trainer.serving.vllm.broadcast_worker import BroadcastWorker
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup

fault = Path(sys.argv.pop(1))
receive_one, load = BroadcastGroup._broadcast, BroadcastWorker.atropos_load_broadcast

def receive(self, tensor):
    receive_one(self, tensor)
    if fault.read_text() == "a bit flips":
        tensor.view(-1).view(dtype=__import__("torch").int32)[7] ^= 1

def load_some(self, transfer_id):
    if fault.read_text() == "loading breaks off":
        aside = self._atropos_reception.aside
        self.model_runner.model.load_weights((name, aside[name]) for name in sorted(aside)[: len(aside) // 2])
        raise RuntimeError("no memory left")
    return load(self, transfer_id)

BroadcastGroup._broadcast = receive
BroadcastWorker.atropos_load_broadcast = load_some
from example_trainer.vllm_api_server import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    path = tmp_path_factory.mktemp("fault") / "kind"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def start(start_server, fault):
    """Start one of the two servers, of which the second is faulty, or start it again on its port."""
    ports = [free_port(), free_port()]

    def start_one(index):
        launcher = [sys.executable, "-c", FAULTY, str(fault)] if index else None
        token = {"ATROPOS_BRIDGE_TOKEN": "known"}
        return start_server("--await-policy", port=ports[index], launcher=launcher, environ=token)

    return start_one


@pytest.fixture(scope="module")
def servers(start):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


@pytest.fixture(scope="module")
def bridge(servers):
    config = config_of(
        servers[0].url,
        servers[0].model,
        dtype="float32",
        num_inference_nodes=len(servers),
        inference_urls=[server.url for server in servers],
        bridge_token="known",
        wait_timeout=120,
        drain_seconds=0,
    )
    made = BroadcastBridge(config, partial(WeightSource, limit_bytes=SMALL_BUCKET), lease_seconds=2)
    made.prepare()
    yield made
    made.close()


def shift(policy, seed):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1 + 0.1 * torch.randn(master.shape, generator=noise))


def agree(bridge, version):
    """Return True if every server samples from exactly the weights that the trainer computes with."""
    for member in bridge._members:
        boot = member.client.info().boot_id
        samples = [
            _checked(prompt, member.client.generate(_request(prompt)), version=version, boot_id=boot)
            for prompt in probe_prompts(300, 2048)[2:4]
        ]
        agreement = compare(bridge._policy, samples, bridge._check.limit)
        if not agreement.difference.within(agreement.limit):
            return False
    return True


def status_of(server):
    return server.post("/generate", {"prompt": [1], "max_tokens": 1}).status_code


def test_r27_servers_that_await_weights_serve_nothing_before_the_first_broadcast(bridge, servers):
    assert [status_of(server) for server in servers] == [503, 503]
    bridge.publish(1)
    assert agree(bridge, 1)
    shift(bridge._policy, 4)
    assert bridge.notify_update().version == 2
    assert agree(bridge, 2)


@pytest.mark.parametrize("load", ["idle", "decoding", "long shared prompts"])
def test_r1_on_both_servers_each_token_is_of_the_version_stamped_on_it(
    bridge, servers, reference, publishes_under, errors_of, load
):
    if load != "long shared prompts" and "ATROPOS_PUBLISHES" not in os.environ:
        pytest.skip("ATROPOS_PUBLISHES=100 runs every kind of load")
    weights = {}

    def publish():
        version = bridge.highest_version() + 1
        weights[version] = {name: tensor.clone() for name, tensor in reference.variant(100 + version).items()}
        bridge._policy.load_masters(weights[version])
        report = bridge.publish(version)
        assert [server.version for server in servers] == [version, version]
        return report

    publish()
    replies, reports = publishes_under(servers[0], publish, load, servers[1])
    errors = [error for reply in replies for error in errors_of(weights, reply)]
    assert len({span[2] for reply in replies for span in reply["policy_versions"][0]}) >= len(reports) / 2
    assert {reply["boot_id"] for reply in replies} == {server.info()["boot_id"] for server in servers}
    assert len(errors) >= 2000
    assert max(errors) <= MAX_ERROR
    assert statistics.fmean(errors) <= MEAN_ERROR


class Faults:
    """Faults to inject on the trainer's side, for the second server or for all."""

    def __init__(self, bridge, servers, monkeypatch):
        self.second, self.servers, self.patch = bridge._members[1].client, servers, monkeypatch
        self.broadcast, self.begin, self.call = (
            BroadcastGroup._broadcast,
            ServerClient.begin_publish,
            ServerClient._call,
        )

    def transfer_breaks_off(self):
        sent = []

        def broadcast(group, tensor):
            sent.append(tensor)
            if len(sent) % 5 == 0:
                assert [status_of(server) for server in self.servers] == [200, 200], "while the others wait"
                raise RuntimeError("the network is gone")
            self.broadcast(group, tensor)

        self.patch.setattr(BroadcastGroup, "_broadcast", broadcast)

    def one_cannot_pause(self):
        def begin(client, publish_id, **fields):
            if client is self.second:
                raise ServerRefused("no thread left", 503)
            return self.begin(client, publish_id, **fields)

        self.patch.setattr(ServerClient, "begin_publish", begin)

    def the_end_is_lost(self, answers):
        """Lose the end of a publish to the second server whenever `answers` gives True."""

        def call(client, method, path, *body, **more):
            if client is self.second and path == "/bridge/publish/end" and next(answers, False):
                raise ServerUnavailable("no route to host")
            return self.call(client, method, path, *body, **more)

        self.patch.setattr(ServerClient, "_call", call)

    def dies_while_it_receives(self, then):
        sent = []

        def broadcast(group, tensor):
            sent.append(tensor)
            if len(sent) == 5:
                self.servers[1].kill()
                then()
            self.broadcast(group, tensor)

        self.patch.setattr(BroadcastGroup, "_broadcast", broadcast)


@pytest.fixture
def faults(bridge, servers, monkeypatch):
    return Faults(bridge, servers, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("the transfer breaks off", "the network is gone"),
        ("a bit flips", "the bytes received differ from those sent"),
        ("one cannot pause", "no thread left"),
        ("loading breaks off", "no memory left"),
    ],
)
def test_whatever_fails_before_all_have_loaded_both_go_on_with_the_old_version_until_a_publish_succeeds(
    bridge, servers, faults, fault, kind, told
):
    before = bridge.highest_version()
    old = bridge._policy.snapshot()
    shift(bridge._policy, 9)
    new = bridge._policy.snapshot()
    if kind == "the transfer breaks off":
        faults.transfer_breaks_off()
    elif kind == "one cannot pause":
        faults.one_cannot_pause()
    else:
        fault.write_text(kind)
    with pytest.raises(PublishFailed, match=told):
        bridge.publish(before + 1)
    faults.patch.undo()
    fault.write_text("")
    assert [server.version for server in servers] == [before, before]
    bridge._policy.load_masters(old)
    assert agree(bridge, before), "both still compute with the old weights, which have the same bits"
    bridge._policy.load_masters(new)
    bridge.publish(before + 1)
    assert agree(bridge, before + 1)


def test_r41_whichever_exchange_with_one_server_is_lost_both_come_to_the_new_version(bridge, servers, monkeypatch):
    """They do so at once, or, if one may not have loaded, after all have gone back to the old version."""
    second, weights = bridge._members[1].client, bridge._policy.snapshot()
    exchanges = ("info", "join", "receive", "publish/begin", "load", "publish/end")
    started = time.monotonic()
    for what, moment in itertools.product(exchanges, ("request", "answer")):
        version = bridge.highest_version() + 1
        bridge._policy.load_masters(weights)
        shift(bridge._policy, 20 + version)
        if what == "join":
            bridge._leave()
        with losing(monkeypatch, what, moment, client=second) as lost:
            bridge.publish(version)
        assert len(lost) == 1, (what, moment)
        assert [server.version for server in servers] == [version, version], (what, moment)
    assert time.monotonic() - started < TIMEOUT_SECONDS, "no member waits for one that did not get the request"
    assert agree(bridge, version)
    bridge._policy.load_masters(weights)


def test_a_server_that_is_not_told_to_go_on_is_told_again(bridge, faults):
    version = bridge.highest_version() + 1
    shift(bridge._policy, 10)
    faults.the_end_is_lost(iter([True, True]))
    bridge.publish(version)
    assert agree(bridge, version)


def test_a_server_that_cannot_be_told_serves_neither_version_until_it_gets_the_new_one(bridge, servers, faults):
    """Its lease expires; it cannot know the others' version, so it refuses until the publish is repeated."""
    version = bridge.highest_version() + 1
    shift(bridge._policy, 11)
    seen = set()

    def lost():
        while not servers[1].info()["torn"]:
            yield True
        seen.add((servers[0].version, servers[1].version, status_of(servers[0]), status_of(servers[1])))
        assert bridge.needs_publish()
        yield True

    faults.patch.setattr(ServerClient, "renew_publish", lambda *_: None)
    faults.the_end_is_lost(lost())
    bridge.publish(version)
    assert seen == {(version, version - 1, 200, 503)}
    assert not bridge.needs_publish()
    assert agree(bridge, version)


def test_r27_a_server_killed_while_it_receives_comes_back_to_the_version_of_the_other(bridge, servers, start, faults):
    version = bridge.highest_version() + 1
    shift(bridge._policy, 12)
    first = []

    def restart():
        first.append((servers[0].version, status_of(servers[0])))
        servers[1] = start(1)

    faults.dies_while_it_receives(lambda: threading.Thread(target=restart).start())
    bridge.publish(version)
    assert first == [(version - 1, 200)]
    assert [server.version for server in servers] == [version, version]
    assert agree(bridge, version)
