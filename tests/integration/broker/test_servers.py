"""The registry of inference servers over HTTP: waiting callers are answered at once, without polling, and cheaply."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from atropos_api.client import AsyncBrokerClient, BrokerClient, BrokerRefused
from atropos_api.testing import served_broker
from atropos_api.wire import PolicyUpdate, RunRequest, ServerReport
from benchmarks.broker import servers
from benchmarks.broker.registry import measure_registry

LEASE_SECONDS = 1.0
FOLLOWERS = int(os.environ.get("ATROPOS_FOLLOWERS", "100"))
"""Environments in the measurement of the cost; the promise is about a thousand of them and a fifth as many servers."""


@pytest.fixture
def client():
    with served_broker(server_lease=LEASE_SECONDS) as url, BrokerClient(url, retry_seconds=1.0) as client:
        yield client


@pytest.fixture
def run(client):
    return client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=64, num_steps=9))


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


def report(number=1, **fields):
    values = {"lease_id": f"lease-{number:06}", "boot_id": f"boot-{number}", "mode": "adapters", "port": 9000 + number}
    return ServerReport(**(values | fields))


def prove(client, run, version, *lease_ids):
    update = PolicyUpdate(
        run_id=run.run_id, version=version, step=version, published_at=time.time(), servers=list(lease_ids)
    )
    client.update_policy(update)


def states(found):
    return {server.server_id: server.state for server in found.servers}


def test_a_server_that_waits_learns_at_once_that_it_serves_and_that_it_has_to_drain(client, run, pool):
    assert client.renew_server("a", report()).state == "joining"
    waiting = pool.submit(client.renew_server, "a", report(), state="joining", wait_seconds=20.0)
    time.sleep(0.2)
    assert not waiting.done()
    prove(client, run, 1, report().lease_id)
    assert waiting.result(2).state == "serving"
    waiting = pool.submit(client.renew_server, "a", report(version=1), state="serving", wait_seconds=20.0)
    time.sleep(0.2)
    assert client.drain_server("a").state == "draining"
    assert waiting.result(2).state == "draining"


def test_a_wait_is_answered_with_the_state_unchanged_when_its_time_is_over(client):
    client.renew_server("a", report())
    began = time.monotonic()
    assert client.renew_server("a", report(), state="joining", wait_seconds=0.3).state == "joining"
    assert 0.3 <= time.monotonic() - began < 5


def test_followers_get_the_whole_set_once_it_changes(client, pool):
    client.renew_server("a", report(mode="fixed"))
    found = client.get_servers("default")
    assert states(found) == {"a": "serving"}
    waiting = pool.submit(client.get_servers, "default", since=found.epoch, wait_seconds=20.0)
    time.sleep(0.2)
    assert not waiting.done()
    client.renew_server("b", report(2))
    answer = waiting.result(2)
    assert states(answer) == {"a": "serving", "b": "joining"}
    assert answer.epoch > found.epoch
    assert client.get_servers("default", since=found.epoch, wait_seconds=20.0).epoch >= answer.epoch, "without waiting"


def test_a_silent_server_is_out_when_its_lease_ends_even_without_a_call(client, pool):
    client.renew_server("a", report(mode="fixed"))
    began, found = time.monotonic(), client.get_servers(answering=True)
    gone = found
    while gone.servers:
        gone = client.get_servers(answering=True, since=gone.epoch, wait_seconds=20.0)
    assert LEASE_SECONDS - 0.2 < time.monotonic() - began < LEASE_SECONDS + 2
    (server,) = client.get_servers().servers
    assert (server.state, server.reason) == ("gone", "it did not renew its lease for 1 s")


def test_a_server_that_took_long_to_load_is_out_in_time_too(client, pool):
    client.renew_server("a", report(mode="fixed", ready=False))
    time.sleep(1.2 * LEASE_SECONDS)
    client.renew_server("a", report(mode="fixed"))
    epoch = client.get_servers().epoch
    started = time.monotonic()
    found = client.get_servers(since=epoch, wait_seconds=5 * LEASE_SECONDS)
    assert states(found) == {"a": "gone"}
    assert time.monotonic() - started < 2 * LEASE_SECONDS


def test_a_server_whose_renewal_waits_for_longer_than_the_lease_is_out(client, pool):
    """The lease counts from the call's arrival: a server has to renew again before it ends."""
    client.renew_server("a", report(mode="fixed"))
    began = time.monotonic()
    assert client.renew_server("a", report(mode="fixed"), state="serving", wait_seconds=20.0).state == "gone"
    assert time.monotonic() - began < LEASE_SECONDS + 2


def test_refusals_name_the_remedy(client):
    client.renew_server("a", report())
    with pytest.raises(BrokerRefused, match="--server-id") as in_use:
        client.renew_server("a", report(2))
    assert (in_use.value.status, in_use.value.kind) == (409, "server-id-in-use")
    client.remove_server("a")
    with pytest.raises(BrokerRefused) as ended:
        client.renew_server("a", report())
    assert (ended.value.status, ended.value.kind) == (409, "lease-ended")
    with pytest.raises(BrokerRefused) as unknown:
        client.drain_server("b")
    assert (unknown.value.status, unknown.value.kind) == (404, "unknown-server")
    with pytest.raises(BrokerRefused, match="letters, digits") as malformed:
        client.renew_server("-a", report())
    assert malformed.value.status == 422


def test_the_whole_set_comes_compressed_to_who_takes_that(client):
    client.renew_server("a", report(mode="fixed"))
    with httpx.Client(base_url=client.url) as http:
        plain = http.get("/v1/servers", headers={"Accept-Encoding": "identity"})
        packed = http.get("/v1/servers", headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert packed.json() == plain.json()


def test_a_broker_that_stops_ends_every_wait(pool):
    with served_broker(server_lease=60.0) as url, BrokerClient(url, retry_seconds=0.0) as client:
        client.renew_server("a", report(mode="fixed"))
        epoch = client.get_servers().epoch
        waiting = [
            pool.submit(client.get_servers, since=epoch, wait_seconds=50.0),
            pool.submit(client.renew_server, "a", report(mode="fixed"), state="serving", wait_seconds=50.0),
        ]
        time.sleep(0.3)
        began = time.monotonic()
    for one in waiting:
        one.exception(10)
    assert time.monotonic() - began < 10


@pytest.mark.anyio
async def test_the_async_client_makes_the_same_calls():
    with served_broker() as url:
        async with AsyncBrokerClient(url) as client:
            assert (await client.renew_server("a", report(mode="fixed"))).state == "serving"
            assert states(await client.get_servers("default", answering=True)) == {"a": "serving"}
            assert (await client.drain_server("a")).state == "draining"
            await client.remove_server("a", lease_id=report().lease_id)
            assert states(await client.get_servers()) == {"a": "gone"}


def test_many_who_follow_are_told_of_a_burst_of_servers_a_few_times_only(client):
    """A hundred servers come within a second; each of ten followers would otherwise get a hundred sets."""
    answers, done = [], threading.Event()

    def follow():
        epoch = None
        while not done.is_set():
            found = client.get_servers("default", since=epoch, wait_seconds=0.5)
            if found.epoch != epoch:
                answers.append(len(found.servers))
            epoch = found.epoch

    threads = [threading.Thread(target=follow) for _ in range(10)]
    for thread in threads:
        thread.start()
    for number in range(100):
        client.renew_server(f"s{number}", report(number, mode="fixed", port=9000))
    time.sleep(0.5)
    done.set()
    for thread in threads:
        thread.join()
    assert max(answers) == 100
    assert len(answers) < 10 * 60


def test_following_costs_less_than_a_twentieth_of_a_core(tmp_path):
    lease, seconds = (10.0, 60.0) if FOLLOWERS >= 1000 else (2.0, 6.0)
    with servers.ours("memory", tmp_path, (*servers.ROOMY, "--server-lease", str(lease))) as broker:
        found = measure_registry(broker, FOLLOWERS // 5, FOLLOWERS, seconds, lease_seconds=lease)
    assert found.cpu_fraction < 0.05
    assert found.told_seconds < 5
