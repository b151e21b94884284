"""The contract of every store: rows and bodies come back, transactions are whole, losses are reported."""

import concurrent.futures
import os

import msgspec
import numpy as np
import pytest

from atropos_api.broker import Broker
from atropos_api.errors import StoreUnavailable, StoreUnsafe
from atropos_api.store.base import (
    KEPT_EVENTS,
    LOST,
    Answers,
    BodyRef,
    EnvironmentRow,
    GroupRow,
    KeyRow,
    MetricsRow,
    PolicyRow,
)
from atropos_api.store.directory import open_directory
from atropos_api.store.factory import open_held, open_session
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.store.redis_session import RedisSession
from atropos_api.testing import RedisServer, make_group, running_redis
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.group_json import check_group, decode_fields

ENVIRONMENT = EnvironmentRequest(name="env", group_size=4, max_token_length=9)


@pytest.fixture(scope="module")
def redis_server():
    if not RedisServer.installed():
        pytest.skip("redis-server is not installed")
    with running_redis() as server:
        yield server


class Directory:
    def __init__(self, path):
        self._path = path
        self.ledger = self.bodies = None

    def open(self):
        self.ledger, self.bodies = open_directory(self._path, fsync="never", fresh=False)
        return self.ledger, self.bodies

    def close(self):
        self.bodies.close()
        self.ledger.close()


class Redis(Directory):
    def open(self):
        session = open_session(self._path, lease_seconds=5)
        assert session.acquire()
        self.ledger, self.bodies = open_held(session, fresh=False)
        return self.ledger, self.bodies


class Memory(Directory):
    def open(self):
        if self.ledger is None:
            self.ledger, self.bodies = MemoryLedger(), MemoryBodyLog()
        return self.ledger, self.bodies


@pytest.fixture(params=["memory", "directory", "redis"])
def store(request, tmp_path):
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        made = Redis(server.url)
    else:
        made = Directory(tmp_path) if request.param == "directory" else Memory(tmp_path)
    made.open()
    yield made
    made.close()


def reopen(store):
    store.close()
    return store.open()


def make_row(seq, body, **changes):
    values = {
        "seq": seq, "run_id": "", "env_id": None, "size": 4, "token_count": 40, "body": body,
        "received_version": None, "oldest_version": 2, "arrived_at": 1.5,
    }  # fmt: skip
    return GroupRow(**(values | changes))


def checked(ident):
    return check_group(decode_fields(msgspec.json.encode(make_group(4, 4, first_token=ident * 100))), env_id=0)


def add(store, count, **changes):
    refs = store.bodies.append([b"body %d" % n for n in range(count)])
    store.ledger.add_groups([make_row(n + 1, ref, **changes) for n, ref in enumerate(refs)])
    return refs


def test_rows_of_all_kinds_come_back_as_they_were(store):
    body = BodyRef(0, 1, 5)
    rows = [make_row(1, body), make_row(2, body, run_id="r", env_id=-3, batch=2, key_id=1, form="columns", policy="p")]
    key = KeyRow(key_id=1, owner="env", key="k", group_count=1, used_at=2.0)
    policy = PolicyRow(run_id="r", version=3, step=1, published_at=0.5, orphaned=True)
    environment = EnvironmentRow(
        environment_id=0, name="ü", display_name="ü", group_size=4, max_token_length=9, weight=1.0,
        min_batch_allocation=None, max_batches_offpolicy=3, connected=True, registered_at=1.0, seen_at=2.0,
    )  # fmt: skip
    with store.ledger.transaction():
        store.ledger.add_groups(rows)
        store.ledger.put_key(key)
        store.ledger.put_policy(policy)
        store.ledger.put_environment(environment)
    found = reopen(store)[0].load()
    assert (found.groups, found.keys, found.policies, found.environments) == (rows, [key], [policy], [environment])
    assert (found.next_seq, found.unanswered) == (3, [1])


def test_what_is_unanswered_and_what_may_come_again_is_kept_exactly(store):
    """R9: a repeat is known after any number of crashes, and answers to others do not change that."""
    add(store, 4)
    store.ledger.add_submission([make_row(5, LOST, key_id=1)], None, answers=Answers([1, 3], [(b"a", 2), (b"b", 1)]))
    found = reopen(store)[0].load()
    assert (found.unanswered, found.expected) == ([2, 4], {b"a": 2, b"b": 1})
    store.ledger.add_submission([make_row(6, LOST)], None, answers=Answers([4], [(b"a", 1)]))
    store.ledger.put_answers(Answers([6], [(b"b", 0), (b"c", 1)]))
    assert (store.ledger.load().unanswered, store.ledger.load().expected) == ([2], {b"a": 1, b"c": 1})
    found = reopen(store)[0].load()
    assert (found.unanswered, found.expected) == ([2], {b"a": 1, b"c": 1})


def test_bodies_of_refused_ledger_writes_take_no_space(store, monkeypatch):
    broker = Broker(store.ledger, store.bodies)
    environment = broker.register_environment(ENVIRONMENT).environment_id
    # A directory frees space one segment at a time.
    monkeypatch.setattr(store.bodies, "_segment_bytes", 1, raising=False)
    groups = [checked(1), checked(2)]
    with monkeypatch.context() as patch:
        patch.setattr(store.ledger, "add_submission", refuse)
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                broker.submit(environment, groups, key="k")
    one = sum(group.byte_count for group in groups) + 200
    assert store.bodies.size_bytes() < one
    assert broker.submit(environment, groups, key="k").accepted == 2
    assert store.bodies.size_bytes() < one
    (first, second) = reopen(store)[0].load().groups
    assert len(store.bodies.read([first.body, second.body])) == 2


def refuse(*_, **__):
    raise StoreUnavailable("no room")


def test_bodies_come_back_byte_for_byte_with_their_rows(store):
    bodies = [b"a", b"", os.urandom(100_000), b"z" * 1000]
    refs = store.bodies.append(bodies)
    store.ledger.add_groups([make_row(n + 1, ref) for n, ref in enumerate(refs)])
    assert store.bodies.read(refs) == bodies
    _, log = reopen(store)
    assert log.adopt(refs) == []
    assert log.read(refs) == bodies
    assert log.size_bytes() >= sum(map(len, bodies))


def test_changes_of_a_row_add_up(store):
    add(store, 3)
    store.ledger.assign_batch([1, 2], 5)
    store.ledger.adopt_groups("run")
    store.ledger.move_groups([(2, LOST)])
    store.ledger.drop_groups([3])
    found = reopen(store)[0].load().groups
    assert [(row.seq, row.batch, row.run_id) for row in found] == [(1, 5, "run"), (2, 5, "run")]
    assert found[1].body == LOST
    store.ledger.assign_batch([1, 2], 0)
    assert [row.batch for row in reopen(store)[0].load().groups] == [0, 0]


def test_many_rows_are_one_transaction(store):
    refs = store.bodies.append([b"x"] * 5000)
    store.ledger.add_groups([make_row(n + 1, ref) for n, ref in enumerate(refs)])
    store.ledger.assign_batch(range(1, 5001), 1)
    ledger, bodies = reopen(store)
    assert [row.batch for row in ledger.load().groups] == [1] * 5000
    assert bodies.adopt(refs) == []
    ledger.drop_groups(range(1, 5001))
    assert reopen(store)[0].load().groups == []


def test_a_body_that_is_gone_is_named_at_start(store):
    refs = add(store, 2)
    nowhere = BodyRef(0, 10**9, 5)
    _, log = reopen(store)
    assert log.adopt([*refs, nowhere]) == [nowhere]


def test_a_discarded_body_gives_its_space_back(store):
    refs = add(store, 2)
    store.bodies.adopt(refs)
    store.bodies.discard(refs[:1])
    store.ledger.drop_groups([1])
    assert store.bodies.read(refs[1:]) == [b"body 1"]
    store.ledger.drop_groups([2])
    store.bodies.discard(refs[1:])
    ledger, log = reopen(store)
    Broker(ledger, log)
    assert log.size_bytes() == 0


@pytest.mark.parametrize("store", ["directory", "redis"], indirect=True)
def test_a_transaction_that_fails_keeps_nothing(store):
    def add_and_fail():
        with store.ledger.transaction():
            add(store, 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        add_and_fail()
    store.ledger.probe()
    found = reopen(store)[0].load()
    assert (found.groups, found.next_seq, found.unanswered) == ([], 1, [])


def test_a_term_that_is_over_writes_and_reads_nothing(redis_server):
    redis_server.flush()
    first, second = (open_session(redis_server.url, lease_seconds=0.5) for _ in range(2))
    assert first.acquire()
    ledger, bodies = open_held(first, fresh=False)
    assert not second.acquire()
    first.step_down()
    # The same broker again has a new term, so pending writes of its old term are void.
    assert first.acquire()
    for use in (ledger.probe, ledger.load, lambda: bodies.read([LOST])):
        with pytest.raises(StoreUnavailable, match="not the active one"):
            use()
    # Redis itself refuses a late write, even if its sender believes that it is active.
    stale = first.term
    assert first._run("return redis.call('SET', KEYS[1], 'somebody else')")
    stale.stage("HSET", "atropos:places", "probed", 1)
    with pytest.raises(StoreUnavailable, match="took over"):
        stale.apply()
    assert not first.held
    assert first.call("HGETALL", "atropos:places") == {}
    for session in (first, second):
        session.close()


def test_a_term_that_was_given_up_is_not_taken_up_again_by_a_renewal_under_way(redis_server):
    """R18: after a lost answer memory and Redis may differ, so only a new term, which reads Redis, may continue."""
    redis_server.flush()
    session = open_session(redis_server.url, lease_seconds=30)
    assert session.acquire()
    redis_server.pause()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        renewed = pool.submit(session.renew)
        while not renewed.running():
            pass
        # The other thread lost its answer.
        session.step_down()
        redis_server.resume()
        assert not renewed.result()
    assert not session.held
    with pytest.raises(StoreUnavailable, match="not the active one"):
        session.term.apply()
    assert session.acquire()
    session.close()


def test_what_was_read_while_the_lease_ended_is_not_used(redis_server, monkeypatch):
    """R18: another broker may have changed the data meanwhile."""
    redis_server.flush()
    session = open_session(redis_server.url, lease_seconds=30)
    assert session.acquire()
    call = session.call

    def call_late(*command):
        found = call(*command)
        session.term.hold_until(0.0)
        return found

    monkeypatch.setattr(session, "call", call_late)
    with pytest.raises(StoreUnavailable, match="not the active one"):
        session.term.ask("GET", "atropos:lease")
    session.close()


@pytest.mark.parametrize("store", ["directory", "redis"], indirect=True)
def test_events_and_their_ids_go_on_where_the_last_process_was(store):
    """R18: ids are the store's sequence, so `Last-Event-ID` works over restarts and takeovers, with any clock."""
    log = Broker(store.ledger, store.bodies, clock=lambda: 5000.0).state.events
    for number in range(KEPT_EVENTS + 150):
        log.add("something", number=number)
    seen = log.last_id - 3
    store.ledger.probe()
    again = Broker(*reopen(store), clock=lambda: 1.0).state.events
    assert [event.data["number"] for event in again.after(seen)] == list(range(KEPT_EVENTS + 147, KEPT_EVENTS + 150))
    again.add("later")
    assert [event.type for event in again.after(seen)] == ["something"] * 3 + ["later"]
    assert not again.has_forgotten(seen)
    assert len(store.ledger.load().events) < KEPT_EVENTS + 150


@pytest.mark.parametrize(
    ("setting", "value", "kept"),
    [
        ("appendonly", "no", "yes"),
        ("appendfsync", "everysec", "always"),
        ("no-appendfsync-on-rewrite", "yes", "no"),
        ("maxmemory-policy", "allkeys-lru", "noeviction"),
    ],
)
def test_a_redis_that_may_forget_is_refused_by_the_name_of_the_setting(redis_server, setting, value, kept):
    """R18: the broker checks Redis' settings, and names the wrong one."""
    session = RedisSession(redis_server.url, lease_seconds=5)
    session.call("CONFIG", "SET", "maxmemory", "1gb")
    session.check_promises()
    session.call("CONFIG", "SET", setting, value)
    with pytest.raises(StoreUnsafe, match=f"{setting} {value}.*CONFIG SET {setting} {kept}"):
        session.check_promises()
    session.call("CONFIG", "SET", setting, kept)
    session.call("CONFIG", "SET", "maxmemory", "0")
    session.close()


def test_a_broker_that_reads_its_store_again_finds_all_that_it_held(store):
    broker = Broker(store.ledger, store.bodies)
    env_id = broker.register_environment(ENVIRONMENT).environment_id
    broker.begin_run(RunRequest(name="run", batch_size=4, max_token_length=9, num_steps=0))
    for number in range(3):
        broker.submit(env_id, [checked(number)])
    (first,) = broker.read_bodies(broker.get_batch(1))
    for _ in range(2):
        broker.rebuild()
        assert (broker.state.queue.groups, list(broker.state.batches)) == (2, [1])
        assert broker.read_bodies(broker.get_batch(1)) == [first]
    assert broker.state.counters.groups_lost_total == 0


def test_a_full_redis_takes_commits_but_no_groups_and_loses_none(redis_server):
    """A commit frees memory; a Redis that refused it for lack of memory would stay full for ever."""
    redis_server.flush()
    session = open_session(redis_server.url, lease_seconds=30)
    assert session.acquire()
    broker = Broker(*open_held(session, fresh=False))
    env_id = broker.register_environment(ENVIRONMENT).environment_id
    broker.begin_run(RunRequest(name="run", batch_size=4, max_token_length=9, num_steps=0))
    for number in range(3):
        broker.submit(env_id, [checked(number)])
    session.call("CONFIG", "SET", "maxmemory", "1")
    for number in (1, 2):
        for _ in range(2):
            # The staged removals of the previous submission make no room for this one.
            with pytest.raises(StoreUnavailable, match="refused a write"):
                broker.submit(env_id, [checked(7)])
        assert len(broker.get_batch(number)) == 1
        broker.commit(number)
    session.call("CONFIG", "SET", "maxmemory", "0")
    broker.submit(env_id, [checked(8)])
    assert (broker.state.queue.groups, session.call("HLEN", "atropos:bodies")) == (2, 2)
    broker.close()


def test_a_redis_without_room_refuses_a_submission_and_takes_the_next(redis_server):
    redis_server.flush()
    session = open_session(redis_server.url, lease_seconds=30)
    assert session.acquire()
    ledger, bodies = open_held(session, fresh=False)
    (ref,) = bodies.append([b"refused"])
    session.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="refused a write"):
        ledger.add_groups([make_row(1, ref)])
    bodies.discard([ref])
    session.call("CONFIG", "SET", "maxmemory", "0")
    # The refused row is not kept, so no later change can write it.
    ledger.adopt_groups("run")
    (ref,) = bodies.append([b"taken"])
    ledger.add_groups([make_row(1, ref)])
    assert [(row.run_id, row.body) for row in ledger.load().groups] == [("", ref)]
    assert bodies.read([ref]) == [b"taken"]
    assert session.call("HLEN", "atropos:bodies") == 1
    ledger.close()


def metrics_row(step, *numbers):
    return MetricsRow(step, step + 0.5, np.array(numbers, dtype="<f8").tobytes())


def test_metrics_come_back_by_step_and_a_step_that_is_put_again_replaces_the_first(store):
    ledger = store.ledger
    ledger.put_metric_names("r", ["a", "b"])
    ledger.put_metrics("r", [metrics_row(step, step, 0.5) for step in (3, 1, 2)])
    ledger.put_metrics("r", [metrics_row(2, 9.0)])
    ledger.put_metrics("other", [metrics_row(7, 1.0)])
    ledger = reopen(store)[0]
    assert ledger.metric_names() == {"r": ["a", "b"]}
    expected = [metrics_row(1, 1, 0.5), metrics_row(2, 9.0), metrics_row(3, 3, 0.5)]
    assert ledger.metrics_after("r", -1, 10) == expected
    assert ledger.metrics_after("r", 1, 1) == expected[1:2]


def test_dropped_metrics_are_gone_and_those_of_other_runs_stay(store):
    for run in ("r", "other"):
        store.ledger.put_metric_names(run, ["a"])
        store.ledger.put_metrics(run, [metrics_row(step, 1.0) for step in range(1, 6)])
    store.ledger.drop_metrics("r", 2, 4)
    assert [row.step for row in reopen(store)[0].metrics_after("r", -1, 10)] == [1, 5]
    store.ledger.forget_metrics("r")
    ledger = reopen(store)[0]
    assert ledger.metric_names() == {"other": ["a"]}
    assert ledger.metrics_after("r", -1, 10) == []
    assert len(ledger.metrics_after("other", -1, 10)) == 5
