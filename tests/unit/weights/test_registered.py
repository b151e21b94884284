"""The bridge to registered servers: its reports to the broker, the servers that it proves, and all others."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from atropos_api.client import BrokerUnreachable
from example_trainer.errors import CannotSwap, ProofFailed, PublishFailed, ServerUnavailable, WaitStopped
from example_trainer.weights import registered
from example_trainer.weights.base import Cost
from example_trainer.weights.delivery import Delivered, Proof
from example_trainer.weights.members import Member, MemberCalls
from example_trainer.weights.registered import (
    FIRST_LIMIT_SECONDS,
    LEAST_LIMIT_SECONDS,
    PROOF_SECONDS,
    RegisteredBridge,
)
from example_trainer.weights.testing import config_of


class Delivery:
    """Delivers to all but those that are to be lost."""

    def __init__(self):
        self.loses, self.limits, self.sent, self.noted = {}, [], [], []

    def attach(self, policy):
        self.policy = policy

    def examine(self, info, url):
        pass

    def deliver(self, members, version, *, limit_seconds):
        self.limits.append(limit_seconds)
        self.sent.append((version, [member.lease_id for member in members]))
        lost = {member: self.loses[member.lease_id] for member in members if member.lease_id in self.loses}
        return Delivered([member for member in members if member not in lost], lost, Cost(fence_seconds=0.5))

    def check(self, member, version):
        pass

    def proof(self):
        return Proof(self.policy)

    def should_publish(self, steps):
        return steps > 0

    def note(self, report):
        self.noted.append(report)

    def close(self, members):
        pass


class Members:
    """Members that a test sets, and what becomes of them."""

    def __init__(self):
        self.here, self.lost, self.refused, self.trusted, self.joins = [], [], [], [], False

    def wait_for(self, count, timeout_seconds, *, refuses_unfit=False):
        return list(self.here)

    def present(self):
        return list(self.here)

    def has_joiners(self):
        if isinstance(self.joins, Exception):
            raise self.joins
        return self.joins

    def lose(self, member, error):
        member.proven = False
        self.lost.append(member.lease_id)

    def refuse(self, member, error):
        self.refused.append(member.lease_id)

    def trust(self, member):
        self.trusted.append(member.lease_id)

    def close(self):
        pass

    known = ()


class Check:
    """A parity check that finds these leases to compute something else, or gone."""

    def __init__(self, **_):
        self.wrong, self.gone, self.ran, self.due = set(), set(), [], False

    def is_due(self):
        return self.due

    def run(self, policy, generate, *, boot_id, **_):
        self.ran.append(boot_id)
        if boot_id in self.wrong:
            raise ProofFailed(f"{boot_id} computes something else")
        if boot_id in self.gone:
            raise ServerUnavailable("no answer")


@pytest.fixture
def bridge(monkeypatch):
    monkeypatch.setattr(registered, "ParityCheck", Check)
    monkeypatch.setattr(registered, "load_policy", lambda _: SimpleNamespace())
    config = config_of("http://127.0.0.1:9", "m", registered_servers=True, wait_timeout=5.0)
    made = RegisteredBridge(config, SimpleNamespace(), Delivery(), MemberCalls(1))
    made._members = Members()
    made.prepare()
    yield made
    made.close()


def member(name, *, proven=False, version=None, highest=None):
    client = SimpleNamespace(url=f"http://{name}", generate=None)
    info = SimpleNamespace(boot_id=name, max_model_len=64, policy_version=version, highest_version=highest)
    return Member(client, info, name, proven)


def test_the_servers_that_have_the_version_and_are_proven_are_reported_to_the_broker(bridge):
    bridge._members.here = [member("a"), member("b")]
    report = bridge.publish(1)
    assert (report.version, report.servers, report.fence_seconds) == (1, ("a", "b"), 0.5)
    assert bridge._check.ran == ["a", "b"]
    assert bridge._members.trusted == ["a", "b"]
    assert bridge._delivery.noted == [report]


def test_a_server_is_proven_once_under_a_lease_and_again_when_a_check_is_due(bridge):
    bridge._members.here = [member("a"), member("b", proven=True)]
    bridge.publish(1)
    assert bridge._check.ran == ["a"]
    bridge.publish(2)
    assert bridge._check.ran == ["a"]
    bridge._check.due = True
    bridge.publish(3)
    assert bridge._check.ran == ["a", "a", "b"]


def test_a_server_that_is_lost_on_the_way_is_left_out_and_the_others_serve(bridge):
    bridge._members.here = [member("a"), member("b", proven=True)]
    bridge._delivery.loses = {"a": ServerUnavailable("killed")}
    assert bridge.publish(1).servers == ("b",)
    assert bridge._members.lost == ["a"]
    bridge._check.gone, bridge._delivery.loses = {"a"}, {}
    assert bridge.publish(2).servers == ("b",), "it ended while it was proven"
    assert bridge._members.lost == ["a", "a"]


def test_a_busy_server_has_time_for_its_proof_as_long_as_it_is_there(bridge, monkeypatch):
    """With the limit of a delivery, 10 s, servers that were full of long requests were left out at each check."""
    monkeypatch.setattr(registered, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(bridge._check, "run", lambda _, generate, **__: answers.append(generate({"n": 8})))
    looks, answers, computed = [], [], threading.Event()

    def info(**_):
        looks.append("there")
        if len(looks) > 2:
            computed.set()

    busy = member("a")
    busy.client.info, busy.client.generate = info, lambda request: computed.wait(20) and {"answer to": request}
    bridge._members.here = [busy]
    assert bridge.publish(1).servers == ("a",)
    assert answers == [{"answer to": {"n": 8}}]
    assert busy.client.patience_seconds == PROOF_SECONDS


def test_a_server_that_is_gone_while_it_is_proven_is_not_waited_for(bridge, monkeypatch):
    monkeypatch.setattr(registered, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(bridge._check, "run", lambda _, generate, **__: generate({}))
    asked = threading.Event()

    def info(**_):
        raise ServerUnavailable("no answer")

    gone = member("a")
    gone.client.info, gone.client.generate = info, lambda _: asked.wait(20)
    bridge._members.here = [gone, member("b", proven=True)]
    assert bridge.publish(1).servers == ("b",)
    assert bridge._members.lost == ["a"]
    asked.set()


def test_a_trainer_that_is_told_to_stop_waits_for_no_proof(bridge, monkeypatch):
    """It would be killed before it had written its checkpoint."""
    monkeypatch.setattr(registered, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(bridge._check, "run", lambda _, generate, **__: generate({}))
    bridge._should_stop, answered = lambda: True, threading.Event()
    busy = member("a")
    busy.client.info, busy.client.generate = lambda **_: None, lambda _: answered.wait(20)
    bridge._members.here = [busy]
    try:
        with pytest.raises(WaitStopped, match="http://a answers a proof"):
            bridge.publish(1)
    finally:
        answered.set()
    assert bridge._members.lost == []


def test_a_joiner_that_computes_something_else_never_serves_while_others_are_sound(bridge):
    bridge._members.here = [member("a", proven=True), member("b")]
    bridge._check.wrong = {"b"}
    assert bridge.publish(1).servers == ("a",)
    assert bridge._members.refused == ["b"]


@pytest.mark.parametrize("proven", [True, False])
def test_a_failed_proof_is_the_trainers_fault_if_nobody_passes_or_one_passed_before(bridge, proven):
    bridge._members.here = [member("a", proven=proven), *([member("b")] if proven else [])]
    bridge._check.wrong, bridge._check.due = {"a"}, True
    with pytest.raises(ProofFailed, match="a computes something else"):
        bridge.publish(1)
    assert bridge._members.refused == []


def test_a_publish_waits_for_a_server_and_fails_in_the_end(bridge, monkeypatch):
    gone = member("a")
    bridge._members.here = [gone]
    bridge._delivery.loses = {"a": ServerUnavailable("killed")}

    def wait_for(count, timeout_seconds, **_):
        if len(bridge._members.lost) == 2:
            bridge._members.here = [member("b")]
        return bridge._members.here

    bridge._members.wait_for = wait_for
    assert bridge.publish(1).servers == ("b",)
    bridge._members.wait_for = lambda *_, **__: [gone]
    clock = iter(range(1000))
    monkeypatch.setattr(registered, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(PublishFailed, match="version 2 reached no server in 5 s"):
        bridge.publish(2)


def test_an_exchange_may_take_twice_the_usual_time(bridge):
    bridge._members.here = [member("a")]
    bridge.publish(1)
    bridge.publish(2)
    assert bridge._delivery.limits == [FIRST_LIMIT_SECONDS, LEAST_LIMIT_SECONDS]
    bridge._usual.extend([6.0, 7.0])
    bridge.publish(3)
    assert bridge._delivery.limits[-1] == 14.0


def test_a_joiner_is_noticed_after_the_first_publish_and_an_unreachable_broker_is_not_an_error(bridge):
    bridge._members.joins = True
    assert not bridge.needs_publish()
    bridge._members.here = [member("a", version=4, highest=7), member("b")]
    assert bridge.highest_version() == 7
    bridge._members.here = [member("a", version=7)]
    assert bridge.highest_version() == 7
    bridge.publish(8)
    assert bridge.needs_publish()
    bridge._members.joins = BrokerUnreachable("down")
    assert not bridge.needs_publish()


def test_an_unfit_server_is_refused_by_what_the_mode_sends(bridge):
    bridge._policy = SimpleNamespace(dtype=torch.float32)

    def refuse(info, url):
        raise CannotSwap(f"{url} serves no adapters")

    bridge._delivery.examine = refuse
    with pytest.raises(CannotSwap, match="http://a serves no adapters"):
        bridge._examine(SimpleNamespace(dtype="float32", head_dtype=None), "http://a")
