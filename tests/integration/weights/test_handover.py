"""One server replaces another under clients that are unaware of it: no request fails, no version falls.

The servers start, hand over and end by the real code, without vLLM, so that a restart takes a second;
`test_restart_bridge` has the same with vLLM.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import psutil
import pytest

from example_trainer import vllm_manager
from example_trainer.errors import ServerExited, ServerUnavailable
from example_trainer.processes.ports import free_port
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weight_protocol.client import ServerClient

from .plain_clients import PlainClients

IMPORT_SECONDS = 3.0
PROGRAM = (sys.executable, "-m", "example_trainer.serving.testing")


@pytest.fixture
def manager(tmp_path):
    """A function that creates a manager of servers without vLLM."""
    made = []

    def make(*, drain_seconds=0.1, port=None, **more):
        options = VllmOptions(
            port=port or free_port(),
            log_path=tmp_path / "logs" / "vllm.log",
            model_name="m",
            drain_seconds=drain_seconds,
            ready_timeout_seconds=60.0,
            program=PROGRAM,
            **more,
        )
        made.append(VllmManager(options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def request_of(number, turn):
    """Return a request: every third streams, some take longer than a server waits, or exceed one read of a socket."""
    body = {"client": number, "turn": turn, "seconds": 0.4 if (number + turn) % 4 == 0 else 0.02}
    if number == 0:
        body["text"] = "x" * 300_000
    if turn % 3 == 0:
        return "/v1/completions", body | {"stream": turn % 2 == 0}
    return "/generate", body


def read(path, response, text):
    told = [json.loads(line) for line in text.splitlines()]
    assert len({line["policy_version"] for line in told}) == 1
    return {"version": told[0]["policy_version"], "digest": told[0].get("digest")}


def test_r42_while_servers_replace_each_other_no_request_of_64_clients_fails_and_no_version_falls(manager, monkeypatch):
    vllm = manager()
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    rooms = iter([True, False, True])
    monkeypatch.setattr(vllm_manager, "has_room", lambda *_, **__: next(rooms))
    pids = [vllm.pid]
    with PlainClients(vllm.url, request_of, read, clients=64, pause_seconds=0.1, patience_seconds=30.0) as clients:
        for version in range(2, 5):
            time.sleep(0.3)
            replacement = vllm.replace("m", version=version)
            assert replacement.info.policy_version == version
            pids.append(vllm.pid)
        time.sleep(0.3)
    assert clients.failures == []
    assert clients.falling() == []
    assert {answer.version for answer in clients.answers} == {1, 2, 3, 4}
    assert {answer.version for answer in clients.answers if answer.path == "/bridge/info"} == {1, 2, 3, 4}
    for answer in clients.answers:
        if answer.body["digest"]:
            sent = hashlib.blake2b(answer.body["sent"], digest_size=16).hexdigest()
            assert answer.body["digest"] == sent, "each request got the answer to its own question"
    assert [psutil.pid_exists(pid) for pid in pids] == [False] * 3 + [True]


def test_r42_a_server_that_dies_loading_or_serving_is_followed_by_one_that_answers_those_who_wait(manager, monkeypatch):
    monkeypatch.setattr(vllm_manager, "has_room", lambda *_, **__: True)
    vllm = manager(drain_seconds=0.0)
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    connection = http.client.HTTPConnection("127.0.0.1", vllm._options.port, timeout=60)
    assert _version(connection) == 1
    options, vllm._options = vllm._options, replace(vllm._options, program=(sys.executable, "-c", "1/0"))
    with pytest.raises(ServerExited):
        vllm.replace("m", version=2)  # no second server comes up, neither next to the first nor after it
    vllm._options = options
    connection.request("GET", "/bridge/info")  # no server is there to answer or to refuse
    vllm.replace("m", version=3)
    assert json.loads(connection.getresponse().read())["policy_version"] == 3
    os.kill(vllm.pid, signal.SIGKILL)
    waiting = http.client.HTTPConnection("127.0.0.1", vllm._options.port, timeout=60)
    waiting.request("GET", "/bridge/info")
    vllm.replace("m", version=4)
    assert json.loads(waiting.getresponse().read())["policy_version"] == 4
    connection.close()
    waiting.close()


@pytest.fixture
def with_standby(manager, monkeypatch):
    """A manager with a server of version 1, and a standby for the next one: imports last for seconds."""
    monkeypatch.setattr(vllm_manager, "has_room", lambda *_, **__: True)
    vllm = manager(standby=True, settings={"import_seconds": IMPORT_SECONDS, "adapter": "first"})
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    vllm.prepare_standby()
    return vllm


def imported(vllm):
    """Return the standby's process id, once its imports are over."""
    time.sleep(IMPORT_SECONDS + 1.0)
    assert vllm._standby.running
    return vllm._standby.pid


def test_a_standby_serves_the_next_version_without_importing_anything(with_standby):
    vllm, took = with_standby, []
    with PlainClients(vllm.url, request_of, read, pause_seconds=0.03, patience_seconds=30.0) as clients:
        for version in range(2, 5):
            pid = imported(vllm)
            began = time.monotonic()
            assert vllm.replace("m", version=version, adapter="next").info.policy_version == version
            took.append(time.monotonic() - began)
            assert vllm.pid == pid
            vllm.prepare_standby()
    assert min(took) < IMPORT_SECONDS
    assert clients.failures == clients.falling() == []
    assert {answer.version for answer in clients.answers} == {1, 2, 3, 4}


@pytest.mark.parametrize("room", [True, False])
def test_a_standby_that_has_been_killed_is_done_without(with_standby, monkeypatch, room):
    monkeypatch.setattr(vllm_manager, "has_room", lambda *_, **__: room)
    pid = imported(with_standby)
    os.kill(pid, signal.SIGKILL)
    assert with_standby.replace("m", version=2).info.policy_version == 2
    assert with_standby.pid != pid


def test_a_standby_answers_those_who_wait_for_a_server_that_was_killed(with_standby):
    pid = imported(with_standby)
    os.kill(with_standby.pid, signal.SIGKILL)
    waiting = http.client.HTTPConnection("127.0.0.1", with_standby._options.port, timeout=60)
    waiting.request("GET", "/bridge/info")
    with_standby.replace("m", version=2)
    assert json.loads(waiting.getresponse().read())["policy_version"] == 2
    assert with_standby.pid == pid
    waiting.close()


def test_a_standby_ends_with_its_manager_and_is_not_started_without_memory(with_standby, monkeypatch):
    pid = imported(with_standby)
    with_standby.prepare_standby()
    assert with_standby._standby.pid == pid, "there is a second server already"
    began = time.monotonic()
    with_standby.stop()
    assert time.monotonic() - began < 8
    assert not psutil.pid_exists(pid)
    with_standby.start("m", version=2)
    with_standby.wait_until_ready(2)
    monkeypatch.setattr(vllm_manager, "STANDBY_FREE_BYTES", 1 << 60)
    with_standby.prepare_standby()
    assert with_standby._standby is None


def _version(connection):
    connection.request("GET", "/bridge/info")
    return json.loads(connection.getresponse().read())["policy_version"]


def test_a_server_that_is_stopped_for_good_answers_waiting_clients_and_closes_the_port(manager):
    vllm = manager(drain_seconds=0.0)
    vllm.start("m", version=1)
    vllm.wait_until_ready(1)
    idle, busy = (http.client.HTTPConnection("127.0.0.1", vllm._options.port, timeout=60) for _ in range(2))
    assert _version(idle) == 1
    busy.request("POST", "/generate", json.dumps({"seconds": 0.4}))
    time.sleep(0.1)
    vllm.close()
    assert busy.getresponse().status in {200, 503}
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        _version(idle)
    with socket.create_server(("127.0.0.1", vllm._options.port)):
        pass
    idle.close()
    busy.close()


def test_a_port_that_is_taken_is_reported_before_anything_is_started(manager):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        vllm = manager(port=taken.getsockname()[1])
        with pytest.raises(ServerUnavailable, match=rf"port {vllm._options.port} is taken by pid {os.getpid()}"):
            vllm.start("m", version=1)
    assert vllm.pid is None


@pytest.fixture
def started():
    """A function that starts a server by hand and closes it with the test."""
    made = []

    def start(*flags):
        made.append(subprocess.Popen([*PROGRAM, *map(str, flags)], stderr=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_a_server_started_by_hand_answers_starting_until_it_has_loaded(started):
    port = free_port()
    started("--port", port, "--policy-version", 7, "--load-seconds", 0.8)
    client, told = ServerClient(f"http://127.0.0.1:{port}"), []
    deadline = time.monotonic() + 60
    while (not told or told[-1][0] != 200) and time.monotonic() < deadline:
        try:
            for method, path, body in (
                ("GET", "/health", None),
                ("HEAD", "/health", None),
                ("GET", "/bridge/info", None),
                ("POST", "/generate", json.dumps({"text": "x" * 300_000}).encode()),
            ):
                answer = client._http.request(method, path, content=body)
                told.append((answer.status_code, answer.headers.get("retry-after"), answer.content and answer.json()))
        except httpx.ConnectError:  # before it has taken its port
            assert told == []
        time.sleep(0.05)
    starting = [entry for entry in told if entry[0] == 503]
    assert len(starting) >= 8
    assert {after for _, after, _ in starting} == {"1"}
    assert {problem["type"] for _, _, problem in starting if problem} == {"urn:atropos:problem:starting"}
    assert client.info().policy_version == 7
    client.close()


def test_of_two_servers_that_want_a_port_the_second_ends_at_once_with_one_line(started):
    port = free_port()
    first = started("--port", port, "--load-seconds", 30)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    second = started("--port", port)
    assert second.wait(60) == 2
    line = second.stderr.read()
    assert line.startswith(f"testing_server: error: port {port} is taken by pid {first.pid} ")
    assert line.count("\n") == 1
