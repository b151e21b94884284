"""The registry and the bridge together: servers join late, die, are cut off and come back with old weights.

The registry is the broker's own, over a clock that the test moves; the servers are in memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.wire import PolicyUpdate, RunRequest, ServerReport
from example_trainer.errors import ProofFailed, ServerUnavailable
from example_trainer.weights import members, registered
from example_trainer.weights.delivery import AdapterDelivery
from example_trainer.weights.members import MemberCalls, RegisteredMembers
from example_trainer.weights.registered import RegisteredBridge
from example_trainer.weights.testing import config_of

from .test_members import info_of

LEASE = 10.0


class Server:
    """A server in memory: a lease at the registry, and the adapter that was sent to it last."""

    def __init__(self, world, name, **info):
        self.world, self.name, self.given = world, name, info
        self.url, self.version, self.digest, self.reachable, self.sound = f"http://{name}", None, "", True, True
        self.leases, self.lease_id = 0, ""
        self.take_new_lease()
        world.servers[self.url] = self

    def take_new_lease(self):
        self.leases += 1
        self.lease_id = f"{self.name}-{self.leases}"

    def renew(self):
        report = ServerReport(
            lease_id=self.lease_id, boot_id=self.name, mode="adapters", url=self.url, version=self.version
        )
        return self.world.registry.renew(self.name, report, "10.0.0.7").state

    @property
    def serves(self):
        """The version that followers get from it; None if the registry does not name it to them."""
        rows = self.world.registry.select("default", answering=True).servers
        return self.version if any(row.lease_id == self.lease_id for row in rows) else None


class World:
    """A broker with its registry, the servers, and a trainer that publishes to them."""

    def __init__(self):
        self.now, self.servers = 100.0, {}
        settings = BrokerSettings(server_lease=LEASE)
        store = MemoryLedger(), MemoryBodyLog()
        self.broker = Broker(*store, settings=settings, clock=lambda: self.now, monotonic=lambda: self.now)
        self.registry = self.broker.state.servers
        self.run = self.broker.begin_run(RunRequest(name="r", batch_size=4, max_token_length=9, num_steps=9))

    def pass_time(self, seconds, *renewing):
        for _ in range(int(seconds)):
            self.now += 1.0
            for server in renewing:
                server.renew()

    def client(self, url, token=None, *, repeats=True):
        server = self.servers[url]

        def info(**_):
            if not server.reachable:
                raise ServerUnavailable(f"{url} does not answer")
            return info_of(boot_id=server.name, policy_version=server.version, **server.given)

        def upload(name, version, body, *, forward_to=()):
            info()
            server.version, server.digest = version, self.digest()
            return {"digest": server.digest, "boot_id": server.name}

        def check(name):
            info()
            return {"digest": server.digest, "misplaced": []}

        return SimpleNamespace(
            url=url,
            info=info,
            upload_adapter=upload,
            check_adapter=check,
            generate=lambda _: server,
            close=lambda: None,
            patience_seconds=1.0,
            use_token=lambda _: None,
        )

    def digest(self):
        return self.delivery._payload.digest()

    def publish(self, version):
        """Publish and announce, as the trainer does after a step and when a server waits."""
        report = self.bridge.publish(version)
        update = PolicyUpdate(
            run_id=self.run.run_id, version=version, step=version, published_at=self.now, servers=[*report.servers]
        )
        self.broker.update_policy(update)

    def get_servers(self, policy=None):
        return self.registry.select(policy)


class Check:
    """A parity check that finds what a server computes with."""

    def __init__(self, **_):
        pass

    def is_due(self):
        return False

    def run(self, policy, generate, *, version, **_):
        server = generate({})
        if not server.sound or server.version != version:
            raise ProofFailed(f"{server.name} computes something else")


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(members, "ServerClient", made.client)
    monkeypatch.setattr(registered, "ParityCheck", Check)
    policy = SimpleNamespace(
        dtype=torch.float32,
        adapter_tensors=lambda _: {"base_model.model.q.lora_A.weight": torch.ones(2, 2)},
        adapter_config=lambda: {"r": 8, "lora_alpha": 8, "target_modules": ["q"]},
        is_sharded=False,
    )
    monkeypatch.setattr(registered, "load_policy", lambda _: policy)
    config = config_of(
        "http://127.0.0.1:9", "m", registered_servers=True, weight_bridge_mode="lora_only", wait_timeout=5.0
    )
    calls = MemberCalls()
    made.delivery = AdapterDelivery(config, calls)
    made.bridge = RegisteredBridge(config, made, made.delivery, calls)
    made.bridge._members = RegisteredMembers(
        made, "default", token="t", examine=made.delivery.examine, calls=calls, clock=lambda: made.now
    )
    return made


@pytest.fixture
def two(world):
    """Two servers that serve version 1."""
    servers = Server(world, "a"), Server(world, "b")
    for server in servers:
        assert server.renew() == "joining"
    world.pass_time(LEASE, *servers)  # after it the registry knows all
    world.bridge.prepare()
    world.publish(1)
    assert [server.serves for server in servers] == [1, 1]
    return servers


def test_a_server_that_comes_late_serves_once_it_has_the_current_weights(world, two):
    world.publish(2)
    late = Server(world, "c")
    assert late.renew() == "joining"
    assert late.serves is None
    assert world.bridge.needs_publish()
    world.publish(2)  # the same weights, for the late one
    assert (late.renew(), late.serves) == ("serving", 2)
    assert not world.bridge.needs_publish()


def test_a_server_that_dies_delays_nobody_and_is_forgotten(world, two):
    alive, dead = two
    dead.reachable = False
    world.publish(2)
    assert (alive.serves, dead.serves) == (2, None), "it had no part in the publish, so it joins again"
    world.pass_time(LEASE + 1, alive)
    assert [row.state for row in world.registry.select().servers if row.server_id == "b"] == ["gone"]
    world.publish(3)
    assert [member.lease_id for member in world.bridge._members.known] == [alive.lease_id]


def test_a_server_that_was_cut_off_comes_back_with_old_weights_and_serves_only_new_ones(world, two):
    here, cut_off = two
    world.pass_time(LEASE + 1, here)
    world.publish(2)
    world.publish(3)
    cut_off.take_new_lease()  # as it does after it has noticed that its lease has ended
    assert cut_off.renew() == "joining"
    assert (cut_off.version, cut_off.serves) == (1, None)
    assert world.bridge.needs_publish()
    world.publish(3)
    assert (cut_off.renew(), cut_off.serves, here.serves) == ("serving", 3, 3)


def test_a_server_that_only_the_trainer_does_not_reach_stops_serving_old_weights(world, two):
    here, hidden = two
    hidden.reachable = False
    world.publish(2)
    assert (hidden.renew(), hidden.serves, here.serves) == ("joining", None, 2)
    hidden.reachable = True
    assert not world.bridge.needs_publish(), "it is left out for a while"
    world.pass_time(members.FIRST_PAUSE_SECONDS + 1, *two)
    assert world.bridge.needs_publish()
    world.publish(2)
    assert hidden.serves == 2


@pytest.mark.parametrize(
    ("stranger", "sound"),
    [({"lora": False}, True), ({"base_digest": None}, False), ({"boot_id": "another"}, True)],
)
def test_a_stranger_that_registers_never_serves_and_costs_the_others_nothing(world, two, stranger, sound):
    boot_id = stranger.pop("boot_id", None)
    other = Server(world, "x", **stranger)
    other.sound = sound
    if boot_id is not None:  # another process than the registered one answers at its address
        other.name = boot_id
        report = ServerReport(lease_id=other.lease_id, boot_id="x", mode="adapters", url=other.url)
        world.registry.renew("x", report, "10.0.0.7")
    else:
        other.renew()
    world.publish(2)
    assert other.serves is None
    assert [server.serves for server in two] == [2, 2]
    assert not world.bridge.needs_publish()
