"""Deliveries to registered servers: one that is lost in a phase of a publish is named, and all others have the version.

The servers are scripted; the exchange between real processes is in `tests/integration/weights/test_broadcast.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import CannotShare, CannotSwap, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup
from example_trainer.weight_protocol.client import Fence, ServerClient
from example_trainer.weights.delivery import SENT_AT_ONCE, AdapterDelivery, BroadcastDelivery
from example_trainer.weights.members import CALLED_AT_ONCE, QUICK_SECONDS, Member, MemberCalls
from example_trainer.weights.testing import config_of

from .test_members import info_of

PHASES = ("join", "receive", "begin", "load", "end")
SLACK_SECONDS = 5.0
"""Time that a busy machine takes for everything that is no wait."""


class Cluster:
    """Scripted servers by name: what each has loaded, and what it was told."""

    def __init__(self):
        self.clients: dict[str, Client] = {}

    def members(self, *names):
        self.clients |= {name: Client(name, self) for name in names}
        return [Member(self.clients[name], self.clients[name].info()) for name in names]

    def versions(self):
        return {name: client.version for name, client in self.clients.items() if client.alive}


class Client(ServerClient):
    """A server that dies, or refuses some times, when it is called for a phase of a publish."""

    def __init__(self, name, cluster):
        super().__init__(f"http://{name}", repeats=False)
        self.name, self.cluster = name, cluster
        self.version, self.loaded, self.alive, self.paused = 1, None, True, False
        self.dies_in: str | None = None
        self.refuses: dict[str, int] = {}
        self.digest: str | None = None
        self.sent_to: list[str] = []

    def call(self, phase):
        if phase == self.dies_in:
            self.alive = False
        if not self.alive:
            raise ServerUnavailable(f"{self.name} does not answer")
        if self.refuses.get(phase):
            self.refuses[phase] -= 1
            raise ServerRefused(f"{self.name} fails to {phase}", 500)

    def info(self, **_):
        self.call("info")
        return info_of(policy_version=self.version, boot_id=self.name)

    def join_broadcast(self, *_):
        self.call("join")

    def receive_broadcast(self, *_):
        self.call("receive")
        return "sent"

    def begin_publish(self, publish_id, **_):
        self.call("begin")
        self.paused = True
        return Fence(publish_id=publish_id, paused_requests=0, generated_tokens_total=0)

    def renew_publish(self, _):
        self.call("renew")

    def load_broadcast(self, _, version, __):
        self.call("load")
        self.loaded = version

    def end_publish(self, _, version, **__):
        self.call("end")
        self.version, self.paused = version, False
        return {}

    def abort_publish(self, *_, **__):
        self.call("abort")
        self.loaded, self.paused = None, False

    def leave_broadcast(self):
        self.call("leave")

    def upload_adapter(self, name, version, body, *, forward_to=()):
        self.call("upload")
        self.version = version
        digest = self.digest or self.cluster.payload.digest()
        forwarded = {}
        for url in forward_to:
            other = self.cluster.clients[url.removeprefix("http://")]
            self.sent_to.append(other.name)
            if other.alive and other.dies_in != "upload":
                other.version = version
                forwarded[url] = {"digest": other.digest or digest, "boot_id": other.name}
        return {"digest": digest, "boot_id": self.name, "forwarded": forwarded}


@pytest.fixture
def cluster(monkeypatch):
    group = SimpleNamespace(send=lambda *_: "sent", close=lambda: None, device=torch.device("cpu"), timeout_seconds=0.0)
    monkeypatch.setattr(BroadcastGroup, "join", lambda *_: group)
    return Cluster()


@pytest.fixture
def calls():
    made = MemberCalls()
    yield made
    made.close()


@pytest.fixture
def broadcast(cluster, calls):
    source = SimpleNamespace(buckets=[], packed=lambda *_: None)
    config = config_of("http://127.0.0.1:9", "m", registered_servers=True, drain_seconds=0.0)
    made = BroadcastDelivery(config, calls, lambda _: source)
    made.attach(SimpleNamespace(device=torch.device("cpu")))
    return made


def test_a_broadcast_reaches_more_servers_than_are_called_at_once(broadcast, cluster, monkeypatch):
    """Each waits for all others to join: with 64 threads for the calls a 65th server was never asked to."""
    members = cluster.members(*(f"s{number}" for number in range(CALLED_AT_ONCE + 1)))
    meeting = threading.Barrier(len(members))
    monkeypatch.setattr(Client, "join_broadcast", lambda *_: meeting.wait(SLACK_SECONDS))
    delivered = broadcast.deliver(members, 2, limit_seconds=SLACK_SECONDS)
    assert delivered.served == members
    assert set(cluster.versions().values()) == {2}


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_ends_in_a_phase_of_a_broadcast_is_lost_and_the_others_go_on_together(broadcast, cluster, phase):
    members = cluster.members("a", "b", "c")
    cluster.clients["b"].dies_in = phase
    delivered = broadcast.deliver(members, 2, limit_seconds=1.0)
    assert [member.client.name for member in delivered.served] == ["a", "c"]
    assert [member.client.name for member in delivered.lost] == ["b"]
    assert cluster.versions() == {"a": 2, "c": 2}
    assert not any(client.paused for client in cluster.clients.values() if client.alive)


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_fails_once_gets_the_version_by_the_next_attempt(broadcast, cluster, phase):
    members = cluster.members("a", "b")
    cluster.clients["b"].refuses = {phase: 1}
    delivered = broadcast.deliver(members, 2, limit_seconds=1.0)
    assert (delivered.lost, cluster.versions()) == ({}, {"a": 2, "b": 2})


def test_a_server_that_fails_again_and_again_holds_nobody_up(broadcast, cluster):
    members = cluster.members("a", "b")
    cluster.clients["b"].refuses = {"load": 100}
    delivered = broadcast.deliver(members, 2, limit_seconds=1.0)
    assert [member.client.name for member in delivered.lost] == ["b"]
    assert cluster.versions() == {"a": 2, "b": 1}
    assert not cluster.clients["b"].paused


def test_a_failure_that_no_server_caused_ends_the_publish_also_after_one_was_lost(broadcast, cluster, monkeypatch):
    members = cluster.members("a", "b")
    cluster.clients["b"].dies_in = "join"

    def fails(*_):
        raise RuntimeError("no route")

    monkeypatch.setattr(BroadcastGroup, "join", fails)
    with pytest.raises(PublishFailed, match="no route"):
        broadcast.deliver(members, 2, limit_seconds=1.0)


def test_servers_that_have_the_version_already_are_left_alone(broadcast, cluster):
    members = cluster.members("a", "b")
    cluster.clients["b"].version = 2
    members[1].info = cluster.clients["b"].info()
    cluster.clients["b"].dies_in = "begin"
    delivered = broadcast.deliver(members, 2, limit_seconds=1.0)
    assert [member.client.name for member in delivered.served] == ["a", "b"]
    assert cluster.clients["b"].alive


def test_a_broadcast_is_refused_by_what_the_server_is_started_for(broadcast):
    with pytest.raises(CannotShare, match="start it without --enable-lora"):
        broadcast.examine(info_of(lora=True), "http://127.0.0.1:1")
    with pytest.raises(CannotShare, match="start it without --share-weights"):
        broadcast.examine(info_of(lora=False, sharing=True), "http://127.0.0.1:1")
    broadcast.examine(info_of(lora=False), "http://127.0.0.1:1")


def test_a_registered_server_elsewhere_is_refused_while_the_trainer_waits_on_its_loopback_interface(
    broadcast, monkeypatch
):
    with pytest.raises(PublishFailed, match=r"http://a cannot meet the trainer at 127\.0\.0\.1"):
        broadcast.examine(info_of(lora=False, hostname="another"), "http://a")
    broadcast.examine(info_of(lora=False, hostname=socket.gethostname()), "http://a")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    broadcast.examine(info_of(lora=False, hostname="another"), "http://a")


@pytest.fixture
def adapters(cluster, calls):
    config = config_of("http://127.0.0.1:9", "m", registered_servers=True, weight_bridge_mode="lora_only", lora_r=8)
    made = AdapterDelivery(config, calls)
    policy = SimpleNamespace(
        dtype=torch.float32,
        adapter_tensors=lambda _: {"base_model.model.q.lora_A.weight": torch.ones(2, 2)},
        adapter_config=lambda: {"r": 8, "lora_alpha": 8, "target_modules": ["q"]},
    )
    made.attach(policy)
    from example_trainer.weight_protocol.transfer import AdapterPayload

    cluster.payload = AdapterPayload.write(policy.adapter_tensors(policy.dtype), policy.adapter_config())
    return made


def test_an_adapter_reaches_all_but_those_that_do_not_answer(adapters, cluster):
    members = cluster.members("a", "b", "c")
    cluster.clients["b"].dies_in = "upload"
    delivered = adapters.deliver(members, 2, limit_seconds=1.0)
    assert [member.client.name for member in delivered.served] == ["a", "c"]
    assert [member.client.name for member in delivered.lost] == ["b"]
    assert cluster.versions() == {"a": 2, "c": 2}


@pytest.fixture
def frozen():
    """A member that is stopped, or whose cable is out: its machine takes connections, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = ServerClient(f"http://127.0.0.1:{listening.getsockname()[1]}", repeats=False)
        yield Member(client, info_of(policy_version=1, boot_id="frozen"))
        client.close()


@pytest.mark.parametrize("mode", ["broadcast", "adapters"])
def test_a_server_that_hangs_delays_the_others_by_no_more_than_the_limit(request, cluster, frozen, mode):
    delivery = request.getfixturevalue(mode)
    began = time.monotonic()
    delivered = delivery.deliver([*cluster.members("a", "b"), frozen], 2, limit_seconds=1.0)
    assert time.monotonic() - began < 1.0 + QUICK_SECONDS + SLACK_SECONDS
    assert list(delivered.lost) == [frozen]
    assert cluster.versions() == {"a": 2, "b": 2}


def test_beyond_eight_servers_members_pass_an_adapter_on_and_the_trainer_sends_it_where_they_do_not_reach(
    adapters, cluster
):
    names = [f"s{number}" for number in range(20)]
    members = cluster.members(*names)
    cluster.clients["s3"].dies_in = "upload"  # one of the first, which passes nothing on then
    cluster.clients["s15"].dies_in = "upload"  # one of the others
    delivered = adapters.deliver(members, 2, limit_seconds=1.0)
    assert sorted(member.client.name for member in delivered.lost) == ["s15", "s3"]
    assert len(delivered.served) == 18
    assert set(cluster.versions().values()) == {2}
    passed_on = [name for client in cluster.clients.values() for name in client.sent_to]
    assert len(passed_on) == len(set(passed_on)) > SENT_AT_ONCE


def test_an_adapter_that_arrives_otherwise_than_it_was_sent_is_not_a_delivery(adapters, cluster):
    members = cluster.members("a", "b")
    cluster.clients["b"].digest = "other"
    delivered = adapters.deliver(members, 2, limit_seconds=1.0)
    assert [member.client.name for member in delivered.served] == ["a"]
    assert "another checksum" in str(delivered.lost[members[1]])


def test_a_server_without_adapters_is_refused_with_the_flags_that_it_needs(adapters):
    with pytest.raises(CannotSwap, match="--enable-lora --max-lora-rank 8"):
        adapters.examine(info_of(lora=False), "http://a")
    adapters.examine(info_of(lora=True), "http://a")
