"""Submissions without a key, over real sockets: which ones count as repeats."""

import json
import socket
import time

import httpx
import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.config import BrokerConfig
from atropos_api.server.app import create_app
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import serve_in_thread


def post_and_hang_up(url, body, *, path="/scored_data", after_seconds=0.0):
    """Send a submission and close the connection before its answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        # A reset instead of an orderly end, as when a client is killed.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(after_seconds)


def ask_and_give_up(url, method, path, body=b"", version="1.1"):
    """Send a request and the connection's end in one segment, as a client does that gives up on a stopped broker."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"{method} {path} HTTP/{version}\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body, socket.MSG_MORE)
    time.sleep(0.1)


@pytest.fixture
def slow_disk(request):
    """A broker that answers a third of a second after it has taken a group."""
    settings = BrokerSettings(**getattr(request, "param", {}))
    broker = Broker(MemoryLedger(), MemoryBodyLog(), settings=settings)
    broker.sync = lambda: time.sleep(0.3)
    with serve_in_thread(create_app(BrokerConfig(store="elsewhere", fsync="always"), broker)) as url:
        yield url, broker


def test_a_group_whose_answer_never_left_is_taken_once_however_often_it_comes(slow_disk, make_group):
    url, broker = slow_disk
    body = json.dumps(make_group(1)).encode()
    post_and_hang_up(url, body, after_seconds=0.1)
    time.sleep(0.5)
    assert broker.state.counters.groups_received_total == 1
    assert httpx.post(f"{url}/scored_data", content=body).json() == {"status": "received"}
    assert (broker.state.queue.groups, broker.state.counters.groups_duplicate_total) == (1, 1)
    # The repeat was answered, so the same bytes once more are another group.
    httpx.post(f"{url}/scored_data", content=body)
    assert broker.state.queue.groups == 2


@pytest.mark.parametrize(("path", "version"), [("/scored_data", "1.1"), ("/v1/groups", "1.1"), ("/v1/groups", "1.0")])
def test_a_group_whose_sender_gave_up_before_it_was_read_is_taken_once(legacy, make_group, path, version):
    """R9: its connection broke before the answer, from the fast path (HTTP/1.1) or the application (HTTP/1.0)."""
    legacy.start(batch_size=4)
    env_id = legacy.register_env()["env_id"]
    group = make_group(1)
    body = group | {"env_id": env_id} if path == "/scored_data" else {"environment_id": env_id, "groups": [group]}
    body = json.dumps(body).encode()
    ask_and_give_up(legacy.url, "POST", path, body, version=version)
    for queued in (1, 2):
        legacy.http.post(path, content=body).raise_for_status()
        assert legacy.http.get("/v1/status").json()["queue"]["groups"] == queued


def test_a_batch_whose_trainer_gave_up_before_it_was_asked_for_is_offered_again(legacy):
    """R8: the kernel accepts an answer for a peer that has left; that is not a delivery."""
    legacy.start(batch_size=4)
    for ident in (1, 2):
        legacy.post(ident)
    for _ in range(2):
        ask_and_give_up(legacy.url, "GET", "/batch")
    assert [legacy.idents() for _ in range(2)] == [[1], [2]]


def test_equal_groups_whose_answers_arrived_are_all_kept(legacy):
    legacy.start(batch_size=4)
    for _ in range(3):
        legacy.post(1)
    assert legacy.http.get("/status").json()["queue_size"] == 3


def test_equal_losses_stand_for_one_repeat(legacy, make_group):
    legacy.start(batch_size=4)
    body = json.dumps(make_group(1)).encode()
    for _ in range(20):
        post_and_hang_up(legacy.url, body)
    time.sleep(0.3)
    before = legacy.http.get("/v1/status").json()["counters"]
    for _ in range(60):
        legacy.http.post("/scored_data", content=body)
    after = legacy.http.get("/v1/status").json()["counters"]
    taken = after["groups_received_total"] - before["groups_received_total"]
    repeats = after["groups_duplicate_total"] - before["groups_duplicate_total"]
    assert taken + repeats == 60
    # Equal fingerprints mean one expected repeat, however many attempts were lost.
    assert repeats <= 1


@pytest.mark.parametrize("slow_disk", [{"dedup_window": 0}], indirect=True)
def test_the_window_of_zero_turns_recognition_off(slow_disk, make_group):
    url, broker = slow_disk
    body = json.dumps(make_group(1)).encode()
    post_and_hang_up(url, body, after_seconds=0.1)
    time.sleep(0.5)
    assert broker.state.counters.groups_received_total == 1, "its answer was lost, not the group"
    httpx.post(f"{url}/scored_data", content=body)
    assert (broker.state.queue.groups, broker.state.counters.groups_duplicate_total) == (2, 0)


def test_a_v1_group_without_a_key_whose_answer_never_left_is_taken_once(slow_disk, make_group):
    url, broker = slow_disk
    environment = {"name": "env", "group_size": 4, "max_token_length": 9}
    httpx.post(f"{url}/v1/environments", json=environment).raise_for_status()
    body = json.dumps({"environment_id": 0, "groups": [make_group(1)]}).encode()
    post_and_hang_up(url, body, path="/v1/groups", after_seconds=0.1)
    time.sleep(0.5)
    answers = [httpx.post(f"{url}/v1/groups", content=body).json() for _ in range(2)]
    assert [(answer["accepted"], answer["duplicates"]) for answer in answers] == [(0, 1), (1, 0)]
    assert broker.state.queue.groups == 2
