"""Members of a publish: those that the registry lists and that answer; others are left out, for a time or finally."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from atropos_api.wire import InferenceServer, ServerSet
from example_trainer.errors import CannotSwap, ServerUnavailable, WaitTimedOut
from example_trainer.weight_protocol.client import ServerInfo
from example_trainer.weight_protocol.manifest import write_token
from example_trainer.weights import members
from example_trainer.weights.members import FIRST_PAUSE_SECONDS, MemberCalls, RegisteredMembers


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class World:
    """A registry and the servers behind the addresses it lists."""

    def __init__(self):
        self.rows, self.infos, self.tokens, self.complete = {}, {}, {}, True

    def add(self, name, *, state="joining", lease=None, boot="b", mode="adapters", **info):
        url = f"http://{name}"
        self.rows[name] = InferenceServer(
            server_id=name,
            lease_id=lease or f"{name}-1",
            boot_id=boot,
            policy="default",
            url=url,
            mode=mode,
            state=state,
            version=None,
            running=0,
            waiting=0,
            kv_free=None,
            silent_seconds=0.0,
        )
        self.infos[url] = info_of(boot_id=boot, **info)

    def get_servers(self, policy=None):
        return ServerSet(epoch=1, complete=self.complete, lease_seconds=10.0, servers=list(self.rows.values()))

    def client(self, url, token=None, *, repeats=True):
        def info(**_):
            answer = self.infos[url]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(
            url=url, info=info, close=lambda: None, use_token=lambda token: self.tokens.__setitem__(url, token)
        )


def info_of(**changes):
    usual = {"model": "m", "boot_id": "b", "sharing": False, "policy_version": None, "torn": False, "lora": True}
    usual["workers"] = 1
    known = {**dict.fromkeys(ServerInfo.__dataclass_fields__), **usual, **changes}
    return ServerInfo(**known)


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(members, "ServerClient", made.client)
    return made


@pytest.fixture
def follow(world):
    """A function that makes the members of this world, and their clock."""

    def make(examine=lambda *_: None):
        clock = Clock()
        found = RegisteredMembers(world, "default", token="t", examine=examine, calls=MemberCalls(), clock=clock)
        return found, clock

    return make


def names(found):
    return sorted(member.client.url.removeprefix("http://") for member in found)


def test_members_are_the_servers_that_serve_or_join_and_answer(world, follow):
    for state in ("starting", "joining", "serving", "draining", "gone"):
        world.add(state, state=state)
    world.add("teacher", state="serving", mode="fixed")
    found, _ = follow()
    assert names(found.present()) == ["joining", "serving"]


def test_a_server_that_has_taken_a_members_address_gets_nothing_under_its_lease(world, follow):
    """It may be of another run: until the lease had ended it got this run's weights, and without a proof."""
    world.add("a")
    world.add("b")
    found, clock = follow()
    assert names(found.present()) == ["a", "b"]
    world.infos["http://b"] = info_of(boot_id="of another run")
    assert names(found.present()) == ["a"]
    world.infos["http://b"] = info_of()
    clock.now += FIRST_PAUSE_SECONDS
    assert names(found.present()) == ["a", "b"]


def test_a_server_that_does_not_answer_is_left_out_longer_each_time_and_comes_back(world, follow):
    world.add("a")
    world.add("b")
    found, clock = follow()
    world.infos["http://b"] = ServerUnavailable("gone")
    assert names(found.present()) == ["a"]
    answers = info_of()
    clock.now += FIRST_PAUSE_SECONDS
    assert names(found.present()) == ["a"], "its second attempt, which fails too"
    world.infos["http://b"] = answers
    clock.now += FIRST_PAUSE_SECONDS
    assert names(found.present()) == ["a"], "the pause has doubled"
    clock.now += FIRST_PAUSE_SECONDS
    assert names(found.present()) == ["a", "b"]


def test_only_a_joining_server_that_a_publish_could_reach_is_waited_for(world, follow):
    world.add("a", state="serving")
    found, clock = follow()
    assert not found.has_joiners()
    world.add("fixed", mode="fixed")
    assert not found.has_joiners()
    world.add("b")
    assert found.has_joiners()
    member = next(each for each in found.present() if each.client.url == "http://b")
    found.lose(member, ServerUnavailable("no answer"))
    assert not found.has_joiners()
    clock.now += FIRST_PAUSE_SECONDS
    assert found.has_joiners()
    found.refuse(member, CannotSwap("no adapters"))
    clock.now += 1000
    assert not found.has_joiners()


def test_an_unfit_server_is_refused_under_its_lease_and_looked_at_again_under_the_next(world, follow):
    world.add("a", lora=False)
    refused = []

    def examine(info, url):
        if not info.lora:
            refused.append(url)
            raise CannotSwap(f"{url} serves no adapters")

    found, _ = follow(examine)
    assert found.present() == found.present() == []
    assert refused == ["http://a"]
    with pytest.raises(CannotSwap, match="serves no adapters"):
        found.wait_for(1, 1.0, refuses_unfit=True)
    with pytest.raises(WaitTimedOut, match="1 registered inference server of the policy default"):
        found.wait_for(1, 0.1)
    world.add("a", lora=True, lease="a-2")
    assert names(found.present()) == ["a"]


def test_another_server_at_a_registered_address_is_not_a_member(world, follow):
    world.add("a", boot="one")
    world.infos["http://a"] = info_of(boot_id="another")
    found, _ = follow()
    assert found.present() == []


def test_a_server_that_has_gone_is_forgotten_but_not_while_the_broker_does_not_know_all(world, follow):
    world.add("a", state="serving")
    found, _ = follow()
    (member,) = found.present()
    member.proven = True
    rows, world.rows, world.complete = world.rows, {}, False
    assert found.present() == [member], "the broker has just started, and the server answers"
    world.rows = rows
    assert found.present() == [member]
    world.rows, world.complete = {}, True
    assert found.present() == []


def test_a_member_keeps_its_proof_under_its_lease_only(world, follow):
    world.add("a")
    found, _ = follow()
    (member,) = found.present()
    member.proven = True
    assert found.present()[0].proven
    world.add("a", lease="a-2")
    assert not found.present()[0].proven


def test_the_token_of_a_server_on_this_host_is_read_and_one_that_others_may_read_is_refused(world, follow, tmp_path):
    token = write_token(tmp_path, "own", port=80)
    world.add("here", hostname=socket.gethostname(), token_path=str(token))
    world.add("far", hostname="elsewhere", token_path=str(token))
    found, _ = follow()
    assert names(found.present()) == ["far", "here"]
    assert world.tokens == {"http://here": "own"}
    token.chmod(0o644)
    assert os.getuid() == token.stat().st_uid
    world.add("open", hostname=socket.gethostname(), token_path=str(token))
    assert names(found.present()) == ["far", "here"]
