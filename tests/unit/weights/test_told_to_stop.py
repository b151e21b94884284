"""A trainer that is told to stop waits for no server any more: the time that it has left is for its checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from atropos_api.wire import ServerSet
from example_trainer.distributed.rank0_proxy import RankedBridge
from example_trainer.distributed.ranks import Ranks, decode, encode
from example_trainer.errors import ServerUnavailable, WaitStopped
from example_trainer.weights import publish_loop, restart
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.members import Member
from example_trainer.weights.publish_loop import OpenPublish
from example_trainer.weights.testing import config_of

NOWHERE = "http://127.0.0.1:9"
REGISTRY = SimpleNamespace(get_servers=lambda _: ServerSet(epoch=1, lease_seconds=1.0, servers=[], complete=True))


def gone():
    raise ServerUnavailable("it does not answer")


def wait_for_member(bridge):
    bridge._members = [Member(SimpleNamespace(url=NOWHERE, info=gone, close=lambda: None), None)]
    bridge._outdated_members(1)


def wait_for_replacement(bridge):
    bridge.prepare()
    server = SimpleNamespace(running=True, is_loaded=lambda: False)
    bridge._manager._wait_until_ready(server, 1)


@pytest.mark.parametrize(
    ("settings", "wait"),
    [
        ({"weight_bridge_mode": "shared_vllm"}, lambda bridge: bridge._attach()),
        ({"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 1}, lambda bridge: bridge.prepare()),
        ({"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 1}, wait_for_member),
        ({"weight_bridge_mode": "lora_only"}, lambda bridge: bridge._until_it_answers(gone)),
        (
            {"weight_bridge_mode": "lora_only", "num_inference_nodes": 2},
            lambda bridge: bridge._bridges[1]._until_it_answers(gone),
        ),
        ({"weight_bridge_mode": "none"}, wait_for_replacement),
        (
            {"weight_bridge_mode": "lora_only", "registered_servers": True},
            lambda bridge: bridge._members.wait_for(1, 600.0),
        ),
    ],
    ids=["shared", "broadcast at the start", "broadcast", "adapters", "adapters to several", "restart", "registered"],
)
def test_a_publish_waits_for_no_server_once_the_trainer_is_told_to_stop(tmp_path, monkeypatch, settings, wait):
    """A server that is gone for good kept the trainer waiting until it was killed, so that it wrote no checkpoint."""
    monkeypatch.setattr(restart, "load_policy", lambda _: SimpleNamespace())
    monkeypatch.setattr(restart, "fitted", lambda vllm, _: vllm)
    told = iter([False, True])
    config = config_of(NOWHERE, "m", run_dir=tmp_path, wait_timeout=600.0, **settings)
    bridge = make_bridge(config, registry=REGISTRY, should_stop=lambda: next(told))
    try:
        with pytest.raises(WaitStopped, match="told to stop while waiting for"):
            wait(bridge)
    finally:
        bridge.close()


class RanksOfOne(Ranks):
    """Rank 0 of two, which keeps the message that it sends, or rank 1, which gets that message."""

    def __init__(self, rank, sent=b""):
        self.rank, self.sent = rank, sent

    def on_main(self, action):
        if self.is_main:
            self.sent = encode(action())
        return decode(self.sent)


@pytest.mark.parametrize("by_bucket", [False, True])
def test_every_rank_is_told_that_rank_0_has_stopped_waiting_and_goes_on(by_bucket):
    """It is no failure of rank 0, after which no rank could save its part of the checkpoint."""

    def publish(_):
        raise WaitStopped("told to stop")

    first = RanksOfOne(0)
    for ranks, inner in ((first, SimpleNamespace(publish=publish)), (RanksOfOne(1), None)):
        ranks.sent = first.sent
        bridge = RankedBridge(inner, None, ranks, by_bucket=by_bucket)
        bridge._policy = SimpleNamespace(gathered=nullcontext)
        bridge._source = SimpleNamespace() if by_bucket and inner is None else None
        with pytest.raises(WaitStopped, match="told to stop"):
            bridge.publish(2)


class DrainingServer:
    """A server whose running requests end after a number of calls that have timed out."""

    url = NOWHERE

    def __init__(self, calls):
        self.left, self.begun, self.aborted = calls, set(), []

    def lease(self, *_):
        return nullcontext()

    def begin_publish(self, publish_id, **_):
        self.begun.add(publish_id)
        if self.left:
            self.left -= 1
            raise ServerUnavailable("timed out")
        return "a fence"

    def abort_publish(self, publish_id, **_):
        self.aborted.append(publish_id)

    def info(self):
        return SimpleNamespace()


def open_publish(server, **settings):
    return OpenPublish(server, lease_seconds=30.0, drain_seconds=0.5, **settings)


def test_finish_lets_requests_run_for_longer_than_a_call_may_take(monkeypatch):
    """After ten minutes the publish was given up, and after the fourth time the run ended."""
    monkeypatch.setattr(publish_loop, "_LOOK_SECONDS", 0.0)
    server = DrainingServer(3)
    assert open_publish(server, in_flight="finish").fence == "a fence"
    assert (len(server.begun), server.aborted) == (1, [])
    with pytest.raises(ServerUnavailable):
        open_publish(DrainingServer(1), in_flight="drain")


def test_a_fence_that_waits_for_requests_to_end_is_given_up_at_a_stop(monkeypatch):
    monkeypatch.setattr(publish_loop, "_LOOK_SECONDS", 0.0)
    server, told = DrainingServer(9), iter([False, True])
    with pytest.raises(WaitStopped, match="lets its running requests end"):
        open_publish(server, in_flight="finish", should_stop=lambda: next(told))
    assert set(server.aborted) == server.begun


def test_a_server_that_is_gone_is_not_waited_for_under_finish():
    server = DrainingServer(1)
    with pytest.raises(ServerUnavailable):
        open_publish(server, in_flight="finish")
