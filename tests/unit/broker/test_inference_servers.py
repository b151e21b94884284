"""The registry of inference servers: states, leases and epochs, over a clock that the test moves."""

import itertools

import pytest

from atropos_api.broker.inference_servers import GONE_SECONDS, MOST_SERVERS, STARTING_SECONDS
from atropos_api.errors import InvalidRequest, LeaseEnded, ServerIdInUse, UnknownServer
from atropos_api.wire import ServerReport

LEASE = 10.0
"""The default of --server-lease."""


class Server:
    """One server process as its registry sees it."""

    numbers = itertools.count(1)

    def __init__(self, broker, server_id, **fields):
        self.broker, self.server_id, self.fields = broker, server_id, fields
        self.boot_id = f"boot-{next(self.numbers)}"
        self.take_new_lease()

    def take_new_lease(self):
        self.lease_id = f"lease-{next(self.numbers):06}"

    def renew(self, *, peer="10.0.0.7", **fields):
        values = {"lease_id": self.lease_id, "boot_id": self.boot_id, "mode": "adapters", "port": 9001}
        return self.broker.inner.state.servers.renew(
            self.server_id, ServerReport(**(values | self.fields | fields)), peer
        )

    @property
    def seen(self):
        """The server as its followers see it."""
        found = self.broker.inner.state.servers.select().servers
        return next((one for one in found if one.server_id == self.server_id), None)

    @property
    def state(self):
        return self.seen.state


@pytest.fixture
def make_server(broker):
    return lambda name="a", **fields: Server(broker, name, **fields)


@pytest.fixture
def registry(broker):
    return broker.inner.state.servers


def prove(broker, version, *servers):
    broker.publish(version, version, servers=[server.lease_id for server in servers])


def test_a_server_starts_joins_serves_drains_and_is_gone(broker, make_server, registry):
    broker.begin()
    server = make_server()
    assert server.renew(ready=False).state == "starting"
    assert server.renew().state == "joining"
    prove(broker, 1, server)
    assert server.state == "serving"
    assert server.renew(version=1).state == "serving"
    assert registry.drain("a").state == "draining"
    assert server.renew().state == "draining", "its renewal says so"
    registry.remove("a", server.lease_id)
    assert (server.state, server.seen.reason) == ("gone", "it left")
    broker.now += GONE_SECONDS
    assert server.seen is None


def test_only_a_proof_by_the_trainer_makes_a_joiner_serve(broker, make_server):
    """Not a version that it reports, not a trainer that does not follow the registry, not the proof of another."""
    broker.begin()
    server, other = make_server(), make_server("b")
    broker.publish(1, 1)
    assert server.renew(version=1).state == "joining"
    other.renew()
    prove(broker, 2, other)
    assert (server.renew(version=2).state, other.state) == ("joining", "serving")


def test_a_server_that_a_publish_left_out_has_to_join_again(broker, make_server):
    broker.begin()
    kept, lost = make_server(), make_server("b")
    for server in (kept, lost):
        server.renew()
    prove(broker, 1, kept, lost)
    prove(broker, 2, kept)
    assert (kept.state, lost.state) == ("serving", "joining")
    assert lost.renew(version=1).state == "joining"
    prove(broker, 3, kept, lost)
    assert (kept.state, lost.state) == ("serving", "serving")


def test_the_same_version_announced_again_may_name_more_servers(broker, make_server):
    broker.begin()
    first, joiner = make_server(), make_server("b")
    first.renew()
    prove(broker, 1, first)
    joiner.renew()
    prove(broker, 1, first, joiner)
    assert joiner.state == "serving"


def test_an_announcement_that_was_overtaken_changes_no_server(broker, make_server):
    """The answer to version 1 was lost and the call repeated, after version 2 was announced."""
    broker.begin()
    old, new = make_server(), make_server("b")
    for server in (old, new):
        server.renew()
    prove(broker, 1, old)
    prove(broker, 2, new)
    prove(broker, 1, old)
    assert (old.state, new.state) == ("joining", "serving")


def test_a_lease_that_is_not_renewed_ends_and_is_never_valid_again(broker, make_server):
    broker.begin()
    server = make_server()
    server.renew()
    prove(broker, 1, server)
    broker.now += LEASE - 0.001
    assert server.state == "serving"
    broker.now += 0.001
    assert (server.state, server.seen.reason) == ("gone", "it did not renew its lease for 10 s")
    with pytest.raises(LeaseEnded, match="under another lease id"):
        server.renew(version=1)
    assert server.state == "gone"
    server.take_new_lease()
    assert server.renew(version=1).state == "joining", "although it has the version that is served"
    prove(broker, 1, server)
    assert server.state == "serving"


def test_every_renewal_counts_the_lease_anew(broker, make_server):
    server = make_server(mode="fixed")
    for _ in range(20):
        assert server.renew().lease_seconds == LEASE
        broker.now += LEASE - 0.001
    assert server.state == "serving"


def test_a_server_whose_own_clock_ended_its_lease_joins_again(broker, make_server):
    """It could not renew in time, and its lease is alive here by a moment; the process is the same."""
    broker.begin()
    server = make_server()
    server.renew()
    prove(broker, 1, server)
    server.take_new_lease()
    assert server.renew().state == "joining"


def test_a_model_may_load_for_long(broker, make_server):
    server = make_server()
    assert server.renew(ready=False).lease_seconds == STARTING_SECONDS
    broker.now += STARTING_SECONDS - 1
    assert server.state == "starting"
    assert server.renew().lease_seconds == LEASE
    broker.now += LEASE
    assert server.state == "gone"


def test_a_server_that_crashed_while_it_loaded_is_followed_by_its_next_process(make_server):
    make_server().renew(ready=False)
    assert make_server().renew().state == "joining"


def test_two_processes_under_one_id_are_told_apart(broker, make_server):
    first, second = make_server(), make_server()
    first.renew()
    with pytest.raises(ServerIdInUse, match=r"http://10\.0\.0\.7:9001 for another 10 s.*--server-id"):
        second.renew()
    broker.now += LEASE
    assert second.renew().state == "joining"
    assert second.seen.boot_id == second.boot_id


def test_a_server_of_fixed_weights_serves_without_a_trainer(make_server):
    assert make_server(mode="fixed").renew().state == "serving"


def test_a_server_of_fixed_weights_does_not_serve_a_policy_that_a_run_trains(broker, make_server):
    stranger, teacher = make_server(mode="fixed"), make_server("b", mode="fixed", policy="teacher")
    assert (stranger.renew().state, teacher.renew().state) == ("serving", "serving")
    broker.begin()
    assert (stranger.state, teacher.state) == ("joining", "serving")
    assert "a run trains this policy" in stranger.seen.reason
    assert make_server("c", mode="fixed").renew().state == "joining"


def test_a_server_told_to_drain_keeps_draining_under_whatever_lease(broker, make_server, registry):
    server = make_server()
    server.renew()
    registry.drain("a")
    broker.now += LEASE
    server.take_new_lease()
    assert server.renew().state == "draining"
    broker.now += LEASE
    assert make_server().renew().state == "joining", "the next process was not told"


def test_a_server_that_stops_by_itself_drains(make_server):
    server = make_server(mode="fixed")
    server.renew()
    assert server.renew(draining=True).state == "draining"


def test_drained_servers_get_no_policy_any_more(broker, make_server, registry):
    broker.begin()
    server = make_server()
    server.renew()
    registry.drain("a")
    prove(broker, 1, server)
    assert server.state == "draining"


def test_a_removal_of_an_old_lease_leaves_the_new_process_alone(broker, make_server, registry):
    old = make_server(mode="fixed")
    old.renew()
    broker.now += LEASE
    new = make_server(mode="fixed")
    new.renew()
    registry.remove("a", old.lease_id)
    assert new.state == "serving"


def test_an_unknown_server_is_reported_with_those_that_are_known(make_server, registry):
    make_server("a").renew()
    for call in (registry.drain, registry.remove):
        with pytest.raises(UnknownServer, match=r"'b' \(registered: a\)"):
            call("b")


def test_a_new_run_has_no_proven_server(broker, make_server):
    broker.begin()
    server = make_server()
    server.renew()
    prove(broker, 1, server)
    broker.begin(name="other")
    assert server.state == "joining"


def test_a_resumed_run_keeps_its_proven_servers(broker, make_server):
    broker.begin()
    server = make_server()
    server.renew()
    prove(broker, 1, server)
    broker.begin(resume=True)
    assert server.state == "serving"


def test_after_a_restart_of_the_broker_proven_leases_serve_at_once_and_others_join(broker, make_server):
    broker.begin()
    proven, joiner = make_server(), make_server("b")
    for server in (proven, joiner):
        server.renew()
    prove(broker, 1, proven)
    broker.restart()
    assert proven.seen is None
    assert (proven.renew().state, joiner.renew().state) == ("serving", "joining")


def test_a_set_is_incomplete_until_every_server_had_time_to_register_again(broker, registry):
    first = registry.select("default")
    assert not first.complete
    broker.now += LEASE
    second = registry.select("default")
    assert second.complete
    assert second.epoch > first.epoch, "followers see a new revision"
    assert registry.select("default").epoch == second.epoch


def test_an_epoch_is_that_of_no_earlier_process(broker, make_server, registry):
    make_server().renew()
    before = registry.select().epoch
    broker.now += 1
    broker.restart()
    assert broker.inner.state.servers.select().epoch > before


def test_only_what_followers_act_on_changes_the_epoch(broker, make_server, registry):
    broker.begin()
    server = make_server()
    server.renew()
    before = registry.select("default").epoch
    server.renew(running=7, waiting=3, kv_free=0.5, version=9)
    assert (server.seen.running, server.seen.version) == (7, 9)
    assert registry.select("default").epoch == before
    server.renew(url="http://10.0.0.8:9001")
    moved = registry.select("default").epoch
    assert moved > before
    prove(broker, 1, server)
    assert registry.select("default").epoch > moved


def test_followers_of_one_policy_are_not_woken_by_another(make_server, registry):
    make_server("a", policy="student", mode="fixed").renew()
    before = registry.epoch("student")
    make_server("b", policy="teacher", mode="fixed").renew()
    assert registry.epoch("student") == before
    assert registry.epoch() == registry.epoch("teacher") > before
    assert [server.server_id for server in registry.select("student").servers] == ["a"]


def test_followers_of_answering_servers_are_not_woken_by_joiners(broker, make_server, registry):
    broker.begin()
    server = make_server()
    before = registry.epoch("default", answering=True)
    server.renew(ready=False)
    server.renew()
    assert registry.epoch("default", answering=True) == before
    assert registry.select("default", answering=True).servers == []
    prove(broker, 1, server)
    serving = registry.epoch("default", answering=True)
    assert serving > before
    registry.drain("a")
    assert registry.epoch("default", answering=True) > serving
    assert [one.state for one in registry.select("default", answering=True).servers] == ["draining"]
    registry.remove("a")
    assert registry.select("default", answering=True).servers == []


@pytest.mark.parametrize(
    ("fields", "peer", "url"),
    [
        ({}, "10.0.0.7", "http://10.0.0.7:9001"),
        ({"scheme": "https", "port": 443}, "10.0.0.7", "https://10.0.0.7:443"),
        ({}, "fd00::7", "http://[fd00::7]:9001"),
        ({"url": "http://gpu-3:9001/"}, "10.0.0.7", "http://gpu-3:9001"),
        ({"url": "http://127.0.0.1:9001"}, "127.0.0.1", "http://127.0.0.1:9001"),
    ],
)
def test_the_address_is_what_the_server_names_or_where_it_calls_from(make_server, fields, peer, url):
    server = make_server(**fields)
    server.renew(peer=peer)
    assert server.seen.url == url


@pytest.mark.parametrize(
    ("fields", "peer", "told"),
    [
        ({"url": "http://127.0.0.1:9001"}, "10.0.0.7", "calls from 10.0.0.7.*--advertise-url"),
        ({"url": "http://localhost:9001"}, "10.0.0.7", "loopback"),
        ({"url": "gpu-3"}, "10.0.0.7", "did you mean http://gpu-3"),
        ({"port": None}, "10.0.0.7", "needs url, or the port"),
        ({}, None, "needs url, or the port"),
    ],
)
def test_an_address_that_no_client_could_use_is_refused(make_server, fields, peer, told):
    with pytest.raises(InvalidRequest, match=told):
        make_server(**fields).renew(peer=peer)


def test_the_registry_does_not_grow_without_limit(broker, make_server, registry):
    for number in range(MOST_SERVERS):
        make_server(f"s{number}").renew()
    with pytest.raises(InvalidRequest, match="no more are kept"):
        make_server("one-too-many").renew()
    assert make_server("s0") is not None
    broker.now += LEASE
    registry.expire()
    broker.now += GONE_SECONDS
    assert make_server("one-too-many").renew().state == "joining"


def test_the_time_until_the_next_change_is_that_of_the_next_lease(broker, make_server, registry):
    broker.now += LEASE
    registry.expire()
    assert registry.seconds_to_expiry() == float("inf")
    make_server("a").renew()
    broker.now += 3
    make_server("b").renew()
    assert registry.seconds_to_expiry() == LEASE - 3
    broker.now += LEASE
    registry.expire()
    assert registry.seconds_to_expiry() == GONE_SECONDS, "until ended servers are removed"
    broker.now += GONE_SECONDS
    registry.expire()
    assert registry.seconds_to_expiry() == float("inf")


def test_each_change_is_an_event_with_its_reason(broker, make_server):
    server = make_server(mode="fixed")
    server.renew()
    broker.now += LEASE
    broker.inner.state.servers.expire()
    events = [event.data for event in broker.inner.state.events.after(0) if event.type == "server-changed"]
    assert [(event["server_id"], event["state"]) for event in events] == [("a", "serving"), ("a", "gone")]
    assert "did not renew" in events[-1]["reason"]


def test_counts_by_policy_and_state_leave_out_those_that_are_gone(broker, make_server, registry):
    make_server("a", mode="fixed").renew()
    make_server("b").renew()
    make_server("c").renew()
    registry.remove("c")
    assert list(registry.counts()) == [("default", "joining", 1), ("default", "serving", 1)]
