"""A broker on Redis is killed, replaced by its standby, stopped and resumed, and Redis itself is killed."""

import concurrent.futures
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time

import httpx
import pytest

from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable
from atropos_api.http.auth import AcceptedToken
from atropos_api.server.serve import make_app
from atropos_api.server.standby import Standby
from atropos_api.store.factory import open_held, open_session
from atropos_api.store.failpoints import Failpoint, ignore_failpoint
from atropos_api.testing import RedisServer, running_redis

EVERY = os.environ.get("ATROPOS_KILLS", "") == "all"
LEASE = float(os.environ.get("ATROPOS_KILLS_PATIENCE", "1"))
DIRECTORY_ONLY = ("compaction-", "segment-", "bodies-written", "bodies-synced", "ledger-synced")
STEPS = [step for step in Failpoint if not step.startswith(DIRECTORY_ONLY)]

LONG = pytest.mark.skipif(not EVERY, reason="takes long; set ATROPOS_KILLS=all")

pytestmark = pytest.mark.skipif(not RedisServer.installed(), reason="redis-server is not installed")


@pytest.fixture(scope="module")
def one_redis():
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_server(one_redis):
    one_redis.flush()
    return one_redis


@pytest.fixture
def two_brokers(redis_server, killed_broker):
    """An active broker and its standby."""
    active, standby = (killed_broker("--store", redis_server.url, "--lease", str(LEASE)) for _ in range(2))
    active.start()
    assert active.wait_until(200)
    standby.start()
    assert standby.wait_until(200, path="/livez")
    return active, standby


def readiness(broker):
    response = httpx.get(broker.url + "/readyz")
    return response.status_code, response.json()


def wait_for_word_of(standby, active):
    """Wait until the one names the other as the active broker."""
    deadline = time.monotonic() + 5 * LEASE
    while (readiness(standby)[1].get("active") or {}).get("pid") != active.pid:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_standby_says_so_and_who_is_active_and_follows_it(two_brokers):
    active, standby = two_brokers
    status, problem = readiness(standby)
    assert (status, problem["type"].rpartition("/")[2]) == (503, "standby")
    assert problem["active"]["pid"] == active.pid
    assert f"pid {active.pid}" in problem["detail"]
    response = httpx.post(standby.url + "/v1/runs", json={})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    # A broker that stops in order hands over at once.
    active.kill(signal.SIGTERM)
    started = time.monotonic()
    assert standby.wait_until(200)
    assert time.monotonic() - started < LEASE


def test_killed_or_stopped_at_each_step_its_standby_takes_over_and_nothing_is_lost_or_duplicated(two_brokers, load):
    """R18: a broker that is resumed after its lease has ended changes nothing."""
    work = load(*two_brokers)
    active, standby = two_brokers
    ends = [(step, stop) for step in STEPS for stop in ("", ":stop")]
    if not EVERY:
        ends = [random.choice(ends[::2]), random.choice(ends[1::2])]
    for step, stop in sorted(ends, key=lambda end: not end[0].startswith("run-")):
        work.wait_for_batches(1)
        # The broker that will be stopped has to be the active one.
        active.kill(signal.SIGTERM)
        assert standby.wait_until(200)
        active.start(crash_at=f"{step}:1{stop}")
        if not step.startswith(("store-", "recovered")):
            assert active.wait_until(503, 200)
        standby.kill(signal.SIGTERM)
        if step.startswith("run-"):
            work.restart_trainer()
        assert (active.wait_for_stop if stop else active.wait_for_death)(20), f"{step} was not reached"
        standby.start()
        assert standby.wait_until(200)
        if stop:
            work.wait_for_batches(1)
            active.go_on()
            assert active.wait_until(503)
            wait_for_word_of(active, standby)
        else:
            active.start()
        active, standby = standby, active
        work.check()
    work.finish()


STOPS = [
    Failpoint.SUBMISSION_CHECKED,
    Failpoint.GROUPS_STAGED,
    Failpoint.GROUPS_KEPT,
    Failpoint.ANSWER_BEGUN,
    Failpoint.ANSWER_TORN,
]


def test_a_group_without_a_key_sent_to_one_that_stops_past_its_lease_is_taken_once(redis_server, killed_broker):
    """R9, R18: its sender repeats unanswered groups, after giving up on the stopped broker or waiting for it."""
    cases = [*itertools.product(STOPS, [False, True])]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Each case has a database of its own.
        stores = [f"{redis_server.url[:-1]}{number}" for number in range(len(cases))]
        running = [
            pool.submit(stop_and_repeat, killed_broker, store, *case)
            for store, case in random.sample([*zip(stores, cases, strict=True)], len(cases) if EVERY else 2)
        ]
    for case in running:
        case.result()


def stop_and_repeat(killed_broker, store, step, waits):
    active, standby = (killed_broker("--store", store, "--lease", str(LEASE)) for _ in range(2))
    first, other = ({"tokens": [[n]], "masks": [[n]], "scores": [0.5], "env_id": 0} for n in range(2))

    def post(broker, body, seconds=20):
        return httpx.post(broker.url + "/scored_data", json=body, timeout=seconds).status_code

    def repeat(broker, body):
        """Repeat while the broker is not the active one, as any sender does: on a busy machine a lease may expire."""
        until = time.monotonic() + 20
        while (status := post(broker, body)) == 503 and time.monotonic() < until:
            time.sleep(0.2)
        assert status == 200

    def count(broker):
        return httpx.get(broker.url + "/v1/status").json()["queue"]["groups"]

    active.start(crash_at=f"{step}:1:stop")
    assert active.wait_until(200)
    standby.start()
    assert standby.wait_until(503)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sent = pool.submit(post, active, first, 20 if waits else 0.3)
        assert active.wait_for_stop(5)
        assert standby.wait_until(200)
        if not waits:
            with pytest.raises(httpx.ReadTimeout):
                sent.result()
            repeat(standby, first)
        active.go_on()
        if waits and sent.result() == 503:
            repeat(standby, first)
    assert active.wait_until(503)
    assert count(standby) == 1
    repeat(standby, other)
    # The resumed broker finds the same when it is active again.
    standby.kill(signal.SIGTERM)
    assert active.wait_until(200)
    assert count(active) == 2


@LONG
def test_killed_at_random_the_standby_takes_over_within_the_lease(two_brokers, load):
    active, standby = two_brokers
    work = load(*two_brokers, environments=8)
    waits = []
    for _ in range(50):
        assert standby.wait_until(503)
        time.sleep(random.uniform(0.2, 0.6))
        active.kill()
        started = time.monotonic()
        assert standby.wait_until(200)
        waits.append(time.monotonic() - started)
        active.start()
        active, standby = standby, active
        work.check()
    work.wait_for_batches(2)
    work.finish()
    # On an overloaded machine single takeovers take longer; with ATROPOS_KILLS_PATIENCE above 1 all may.
    assert statistics.median(waits) < LEASE + 0.5 or LEASE > 1


def test_redis_killed_and_restarted_costs_a_pause_and_nothing_else(redis_server, two_brokers, load):
    work = load(*two_brokers)
    for _ in range(10 if EVERY else 1):
        work.wait_for_batches(2)
        redis_server.kill()
        assert all(broker.wait_until(503) for broker in two_brokers)
        time.sleep(random.uniform(0, 1.5 * LEASE))
        redis_server.start()
        work.check()
    work.wait_for_batches(2)
    work.finish()


@LONG
def test_redis_that_hangs_is_a_503_until_it_goes_on(redis_server, two_brokers, load):
    work = load(*two_brokers)
    work.wait_for_batches(1)
    redis_server.pause()
    assert all(broker.wait_until(503) for broker in two_brokers)
    redis_server.resume()
    work.wait_for_batches(2)
    work.finish()


def test_a_queue_that_takes_longer_to_read_than_the_lease_lasts_blocks_no_broker(redis_server):
    seconds = 0.6 * LEASE
    session, other = (open_session(redis_server.url, lease_seconds=seconds) for _ in range(2))
    config = BrokerConfig(store=redis_server.url)

    def activate(*, fresh):
        store = open_held(session, fresh=fresh)
        time.sleep(1.5 * seconds)
        return make_app(config, store, token=AcceptedToken(None), reach=ignore_failpoint)

    standby = Standby(session, activate)
    standby.start(fresh=False)
    assert session.held
    assert not other.acquire()
    standby.close()
    other.close()


def test_a_redis_that_may_forget_is_refused_with_the_command_that_fixes_it(redis_server):
    def forget(when):
        subprocess.run(["redis-cli", "-p", str(redis_server.port), "config", "set", "appendfsync", when], check=True)

    forget("everysec")
    command = [sys.executable, "-m", "atropos_api", "--port", "0", "--store", redis_server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    forget("always")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "appendfsync everysec" in result.stderr
    assert "CONFIG SET appendfsync always" in result.stderr


def test_a_redis_that_is_not_there_is_named_without_its_password():
    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:1/0 does not answer") as caught:
        open_session("redis://:secret@127.0.0.1:1/0", lease_seconds=LEASE)
    assert "secret" not in str(caught.value)


def test_a_standby_that_was_told_to_begin_anew_deletes_nothing_when_it_takes_over(redis_server, killed_broker):
    active = killed_broker("--store", redis_server.url, "--lease", str(LEASE))
    standby = killed_broker("--store", redis_server.url, "--lease", str(LEASE), "--fresh")
    active.start()
    assert active.wait_until(200)
    standby.start()
    assert standby.wait_until(503)
    body = {"name": "kept", "batch_size": 4, "max_token_length": 9, "num_steps": 0}
    assert httpx.post(active.url + "/v1/runs", json=body).status_code == 200
    active.kill()
    assert standby.wait_until(200)
    assert httpx.get(standby.url + "/v1/status").json()["run"]["name"] == "kept"
    # A start while no other process is active deletes the store as told.
    standby.kill(signal.SIGTERM)
    standby.start()
    assert standby.wait_until(200)
    assert httpx.get(standby.url + "/v1/status").json()["run"] is None
