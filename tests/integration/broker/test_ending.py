"""A broker that is told to stop does so at once, and one that reloads its source serves on."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

import atropos_api
from example_trainer.processes.ports import free_port

COMMAND = [sys.executable, "-m", "atropos_api"]


@contextlib.contextmanager
def running(*options, cwd=None):
    port = free_port()
    command = [*COMMAND, "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=cwd) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(url))
            yield url, process
        finally:
            process.terminate()
            process.wait(15)


def answers(url, status="ok"):
    try:
        return httpx.get(f"{url}/livez", timeout=20).json() == {"status": status}
    except httpx.TransportError:
        return False


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(url, path, stack):
    """Send a request without waiting for its answer."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def test_long_polls_watchers_and_stuck_readers_do_not_hold_up_the_end():
    with running("--store", "memory") as (url, process), contextlib.ExitStack() as stack:
        run = {"name": "r", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
        httpx.post(f"{url}/v1/runs", json=run)
        for path in ("/v1/events", "/v1/events", "/v1/batches/1?wait=60"):
            ask(url, path, stack)
        half = ask(url, "/status", stack)
        half.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n[")
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - started < 3


def test_reload_serves_the_changed_source_from_the_same_store(tmp_path):
    shutil.copytree(Path(atropos_api.__file__).parent, tmp_path / "atropos_api")
    page = tmp_path / "atropos_api" / "routes" / "ops.py"
    with running("--store", "data", "--reload", cwd=tmp_path) as (url, process), contextlib.ExitStack() as stack:
        run = {"name": "kept", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
        httpx.post(f"{url}/v1/runs", json=run)
        ask(url, "/v1/events", stack)
        time.sleep(0.6)
        page.write_text(page.read_text().replace('"ok"', '"changed"'))
        os.utime(page, (time.time() + 5, time.time() + 5))
        wait_for(lambda: answers(url, "changed"))
        assert httpx.get(f"{url}/v1/status").json()["run"]["name"] == "kept"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert not answers(url)


TOKEN = "a-secret-of-ours"
FORGED = "x\n00:00:00 run-api I forged\r\x1b[31m"


def test_requests_cannot_write_into_the_log_and_no_token_gets_there():
    with running("--store", "memory", "--token", TOKEN, "--log-level", "debug") as (url, process):
        inside = f"{url}/t/{TOKEN}"
        httpx.post(f"{inside}/scored_data", json={"tokens": FORGED, "masks": [], "scores": []})
        httpx.post(f"{inside}/scored_data_list", json=[{"tokens": [[FORGED]], "masks": [], "scores": []}])
        httpx.post(f"{inside}/v1/runs", json={"name": FORGED, "batch_size": 4, "max_token_length": 9, "num_steps": 3})
        httpx.post(f"{inside}/v1/environments", json={"name": FORGED, "group_size": 4, "max_token_length": 9})
        httpx.get(f"{inside}/v1/batches/%0Aforged")
        with contextlib.ExitStack() as stack:
            ask(url, f"/t/{TOKEN}/v1/batches/1?wait=60 HTTP/9.9\r\nBad", stack)
            ask(url, f"/t/{TOKEN}/v1/events", stack).recv(10)
        time.sleep(0.2)
        process.terminate()
        log = process.stderr.read().decode()
    assert TOKEN not in log
    assert len(log.splitlines()) >= 3
    for line in log.splitlines():
        assert " run-api " in line
        assert not line.endswith("forged")
        assert "\x1b" not in line


def test_no_name_in_a_request_becomes_a_path(tmp_path):
    store = tmp_path / "inner" / "store"
    evil = "../../evil/../../../evil"
    with running("--store", str(store)) as (url, _):
        run = {
            "name": evil,
            "batch_size": 4,
            "max_token_length": 9,
            "num_steps": 3,
            "checkpoint_dir": f"{tmp_path}/evil",
        }
        httpx.post(f"{url}/v1/runs", json=run)
        environment = httpx.post(f"{url}/v1/environments", json={"name": evil, "group_size": 4, "max_token_length": 9})
        group = {"tokens": [[1]] * 4, "masks": [[1]] * 4, "scores": [0] * 4, "images": evil, evil: evil}
        body = {"environment_id": environment.json()["environment_id"], "groups": [group]}
        assert httpx.post(f"{url}/v1/groups", json=body, headers={"Idempotency-Key": evil}).status_code == 202
        for path in ("/v1/runs/..%2F..%2Fevil/finish", "/v1/batches/..%2Fevil/commit"):
            assert httpx.post(f"{url}{path}", json={"run_id": evil}).status_code in {404, 422}
        assert httpx.get(f"{url}/..%2F..%2Fetc%2Fpasswd").status_code == 404
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["store"]
    assert not [path for path in store.rglob("*") if "evil" in path.name]
