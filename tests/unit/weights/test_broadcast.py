"""The broadcast bridge with scripted servers: all of them move to a version, or none does."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused
from example_trainer.processes.ports import NoPort
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup
from example_trainer.weight_protocol.client import Fence, ServerClient
from example_trainer.weights.base import Cost
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.broadcast_exchange import (
    SLOWEST_BYTES_PER_SECOND,
    meeting_address,
    refuse_nccl,
    refuse_shared_gpu,
    refuse_unreachable,
)
from example_trainer.weights.members import Member
from example_trainer.weights.testing import config_of

SOURCE = SimpleNamespace(buckets=[], packed=lambda *_: None)
GROUP = SimpleNamespace(send=lambda *_: "sent", close=lambda: None, device=torch.device("cpu"))


class Client(ServerClient):
    """A server that gives these answers and records the calls of a publish."""

    def __init__(self, name, *, digest="sent", version=1, torn=False, loads=True, workers=1):
        super().__init__(f"http://{name}")
        self.workers = workers
        self.digest, self.version, self.torn, self.loads, self.told = digest, version, torn, loads, []

    def info(self):
        return SimpleNamespace(
            policy_version=self.version, torn=self.torn, publishing=False, boot_id="boot", workers=self.workers
        )

    def receive_broadcast(self, *_):
        return self.digest

    def begin_publish(self, publish_id, **_):
        self.told.append(("begin", publish_id))
        return Fence(publish_id=publish_id, paused_requests=0, generated_tokens_total=0)

    def load_broadcast(self, publish_id, *_):
        self.told.append(("load", publish_id))
        if not self.loads:
            raise ServerRefused("no room", 500)

    def end_publish(self, publish_id, _, **__):
        self.told.append(("end", publish_id))
        return {}

    def abort_publish(self, publish_id, **_):
        self.told.append(("abort", publish_id))


@pytest.fixture
def bridge_to():
    """A function that makes a bridge to these servers."""
    made = []

    def make(*clients, **changes):
        urls = [each.url for each in clients]
        bridge = BroadcastBridge(
            config_of("http://127.0.0.1:9", "m", inference_urls=urls, num_inference_nodes=len(urls), **changes)
        )
        bridge._source = SOURCE
        bridge._members = [Member(each, each.info()) for each in clients]
        made.append(bridge)
        return bridge

    yield make
    for each in made:
        each.close()


def test_trainer_and_the_workers_of_all_servers_meet_with_the_backend_that_is_asked_for(bridge_to, monkeypatch):
    clients, met = [Client("a", workers=2), Client("b")], []
    for client in clients:
        monkeypatch.setattr(client, "join_broadcast", lambda _, rendezvous: met.append(rendezvous) or [None])
    group = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(BroadcastGroup, "join", lambda rendezvous, *_: met.append(rendezvous) or group)
    bridge = bridge_to(*clients, broadcast_backend="nccl")
    with pytest.raises(PublishFailed, match="http://a has no GPU; use gloo"):
        bridge._exchange._join(bridge._members, torch.device("cpu"))
    assert sorted((each.rank, each.world_size, each.backend) for each in met) == [(r, 4, "nccl") for r in (0, 1, 3)]


def test_a_server_at_which_other_bytes_have_arrived_is_named(bridge_to):
    bridge = bridge_to(Client("a"), Client("b", digest="sen"))
    with pytest.raises(ProofFailed, match=r"http://b$"):
        bridge._exchange._send(bridge._members, SOURCE, GROUP)
    whole = bridge_to(Client("a"), Client("b"))
    whole._exchange._send(whole._members, SOURCE, GROUP)


@pytest.mark.parametrize(("loads", "last"), [(True, "end"), (False, "abort")])
def test_all_go_on_under_the_new_version_or_all_are_taken_back(bridge_to, loads, last):
    clients = [Client("a"), Client("b", loads=loads)]
    bridge = bridge_to(*clients)
    if loads:
        bridge._exchange._switch_version(bridge._members, 2, Cost())
    else:
        with pytest.raises(ServerRefused):
            bridge._exchange._switch_version(bridge._members, 2, Cost())
    for each in clients:
        assert [what for what, _ in each.told] == ["begin", "load", last]
        assert len({publish_id for _, publish_id in each.told}) == 1


def test_who_serves_an_older_version_or_torn_weights_is_behind_and_a_newer_one_is_not_overwritten(bridge_to):
    clients = [Client("a", version=2), Client("b", version=1), Client("c", version=2, torn=True), Client("d")]
    clients[3].version = None
    bridge = bridge_to(*clients)
    assert [each.client.url for each in bridge._outdated_members(2)] == ["http://b", "http://c", "http://d"]
    clients[0].version = 3
    with pytest.raises(PublishFailed, match="http://a serves version 3"):
        bridge._outdated_members(2)


@pytest.mark.parametrize(("told", "needed"), [({}, False), ({"version": None}, True), ({"torn": True}, True)])
def test_a_server_that_serves_nothing_is_published_to(bridge_to, told, needed):
    bridge = bridge_to(Client("a"), Client("b", **told))
    bridge._has_published = True
    assert bridge.needs_publish() is needed


@pytest.mark.parametrize(
    ("own", "gpus", "told"),
    [
        ("GPU-1", (["GPU-2"], ["GPU-3", "GPU-1"]), "the server at http://b and the trainer use one GPU"),
        ("GPU-1", (["GPU-2", "GPU-3"], ["GPU-3"]), "the server at http://b and the server at http://a use one GPU"),
        ("GPU-1", (["GPU-2"], [None]), "the server at http://b has no GPU"),
    ],
)
def test_nccl_between_members_that_have_no_gpu_of_their_own_is_refused(own, gpus, told):
    with pytest.raises(PublishFailed, match=told):
        refuse_shared_gpu(own, dict(zip(("http://a", "http://b"), gpus, strict=True)))
    refuse_shared_gpu("GPU-1", {"http://a": ["GPU-2"], "http://b": ["GPU-3", "GPU-4"]})


def test_nccl_is_refused_in_one_line_where_torch_has_none_or_the_trainer_no_gpu(monkeypatch):
    with pytest.raises(PublishFailed, match=r"^--broadcast-backend nccl: this build of torch has no NCCL; use .*gloo$"):
        refuse_nccl(torch.device("cuda", 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(PublishFailed, match=r"^--broadcast-backend nccl: the trainer's device is cpu; use .*gloo$"):
        refuse_nccl(torch.device("cpu"))
    refuse_nccl(torch.device("cuda", 1))


TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "46217", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("settings", "environ", "place"),
    [
        ({}, {}, ("127.0.0.1", None)),
        ({}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, ("10.0.0.1", 29500)),
        ({}, TORCHRUN, ("localhost", None)),
        ({"world_size": 2}, TORCHRUN, ("localhost", None)),
        ({"world_size": 2}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, ("10.0.0.1", None)),
        ({"world_size": 2, "broadcast_address": "10.0.0.2"}, TORCHRUN, ("10.0.0.2", None)),
        ({"broadcast_address": "trainer:29400"}, TORCHRUN, ("trainer", 29400)),
        ({"broadcast_address": "[::1]:29400"}, {}, ("::1", 29400)),
    ],
)
def test_servers_meet_the_trainer_where_nobody_else_listens(settings, environ, place):
    """The port of the ranks' own meeting is taken by them, or by torchrun's agent."""
    config = config_of("http://127.0.0.1:9", "m", num_inference_nodes=1, **settings)
    assert meeting_address(config, environ) == place


def test_a_master_port_that_is_none_is_refused_with_its_variable():
    config = config_of("http://127.0.0.1:9", "m", num_inference_nodes=1)
    with pytest.raises(NoPort, match=r"^\$MASTER_PORT tcp://10\.0\.0\.1:6379: not a port"):
        meeting_address(config, {"MASTER_PORT": "tcp://10.0.0.1:6379"})


def test_a_port_that_the_ranks_have_taken_is_not_listened_on(bridge_to, monkeypatch):
    met, groups = [], []

    class Joining(Client):
        def join_broadcast(self, _, rendezvous):
            met.append(rendezvous)
            groups.append(BroadcastGroup.join(rendezvous, torch.device("cpu")))  # a closed one would end the other's
            return [None]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in (TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        bridge = bridge_to(Joining("a"))
        groups.append(bridge._exchange._join(bridge._members, torch.device("cpu")))
    for group in groups:
        group.close()
    assert [each.port != port for each in met] == [True]


def test_a_server_on_another_host_is_not_sent_to_this_hosts_loopback_interface(bridge_to, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    bridge = bridge_to(Client("a"))
    with pytest.raises(PublishFailed, match=r"http://a cannot meet the trainer at localhost.*--broadcast-address"):
        bridge.prepare()


def test_a_server_at_another_address_of_this_host_meets_the_trainer_on_its_loopback_interface():
    refuse_unreachable("127.0.0.1", ["http://127.0.0.2:9001", "http://[::1]:9001", f"http://{socket.gethostname()}:1"])


@pytest.mark.parametrize("address", ["http://a:1", "a:0", "a:b", "", "a b", "u@a:1"])
def test_a_text_that_is_not_an_address_is_refused_with_the_valid_form(address):
    with pytest.raises(ValidationError, match="write HOST or HOST:PORT"):
        config_of("http://127.0.0.1:9", "m", num_inference_nodes=1, broadcast_address=address)


def test_a_server_has_time_for_all_weights_however_many_they_are(bridge_to):
    """The limit of one call was that of the whole transfer: weights that took longer than it never arrived."""
    given = []

    class Noting(Client):
        def receive_broadcast(self, _, __, timeout_seconds):
            given.append(timeout_seconds)
            return "sent"

    client = Noting("a")
    client.patience_seconds = 60.0
    bridge = bridge_to(client)
    source = SimpleNamespace(buckets=[SimpleNamespace(nbytes=5e9)] * 2, packed=lambda *_: None)
    bridge._exchange._send(bridge._members, source, GROUP)
    assert given == [60.0 + 10e9 / SLOWEST_BYTES_PER_SECOND]


def test_the_failure_of_a_receiver_ends_a_send_that_does_not_notice_it(bridge_to):
    """NCCL waits for a member that is gone; the sender leaves the group and reports the receiver's error."""
    left = threading.Event()

    class Failing(Client):
        def receive_broadcast(self, *_):
            raise ServerRefused("no memory left", 500)

    def send(*_):
        assert left.wait(20)
        raise RuntimeError("the broadcast group has been left")

    group = SimpleNamespace(send=send, close=left.set, device=torch.device("cpu"))
    bridge = bridge_to(Client("a"), Failing("b"))
    with pytest.raises(ServerRefused, match="no memory left"):
        bridge._exchange._send(bridge._members, SOURCE, group)
