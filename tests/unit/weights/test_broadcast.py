"""The broadcast bridge against servers that are answers alone: all of them move to a version, or none does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.weight_protocol.client import Fence, ServerClient
from example_trainer.weights.broadcast import BroadcastBridge, BroadcastOptions, _Cost, _Member

POLICY = SimpleNamespace(dtype=torch.float32, checkpoint_tensors=lambda _: {"w": torch.ones(2)})
GROUP = SimpleNamespace(send=lambda _: "sent", close=lambda: None)


class Client(ServerClient):
    """A server that gives these answers and records the calls of a publish."""

    def __init__(self, name, *, digest="sent", version=1, torn=False, loads=True):
        super().__init__(f"http://{name}")
        self.digest, self.version, self.torn, self.loads, self.told = digest, version, torn, loads, []

    def info(self):
        return SimpleNamespace(policy_version=self.version, torn=self.torn, publishing=False, boot_id="boot")

    def receive_broadcast(self, *_):
        return self.digest

    def begin_publish(self, publish_id, **_):
        self.told.append(("begin", publish_id))
        return Fence(publish_id=publish_id, paused_requests=0, generated_tokens_total=0)

    def load_broadcast(self, publish_id, _):
        self.told.append(("load", publish_id))
        if not self.loads:
            raise ServerRefused("no room", 500)

    def end_publish(self, publish_id, _):
        self.told.append(("end", publish_id))
        return {}

    def abort_publish(self, publish_id, **_):
        self.told.append(("abort", publish_id))


@pytest.fixture
def bridge_to():
    """A function that makes a bridge to these servers."""
    made = []

    def make(*clients):
        options = BroadcastOptions(policy=PolicyOptions(model_name="m"), server_urls=[each.url for each in clients])
        bridge = BroadcastBridge(options)
        bridge._members = [_Member(each, each.info()) for each in clients]
        made.append(bridge)
        return bridge

    yield make
    for each in made:
        each.close()


def test_a_server_at_which_other_bytes_have_arrived_is_named(bridge_to):
    bridge = bridge_to(Client("a"), Client("b", digest="sen"))
    with pytest.raises(ProofFailed, match=r"http://b$"):
        bridge._send(bridge._members, GROUP, POLICY)
    whole = bridge_to(Client("a"), Client("b"))
    whole._send(whole._members, GROUP, POLICY)


@pytest.mark.parametrize(("loads", "last"), [(True, "end"), (False, "abort")])
def test_all_go_on_under_the_new_version_or_all_are_taken_back(bridge_to, loads, last):
    clients = [Client("a"), Client("b", loads=loads)]
    bridge = bridge_to(*clients)
    if loads:
        bridge._switch_version(bridge._members, 2, _Cost())
    else:
        with pytest.raises(ServerRefused):
            bridge._switch_version(bridge._members, 2, _Cost())
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
