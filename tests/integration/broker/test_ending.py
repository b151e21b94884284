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

COMMAND = [sys.executable, "-m", "atropos_api"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
            process.stderr.close()
            process.wait(15)


def answers(url):
    try:
        return httpx.get(f"{url}/livez").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(url, path, stack):
    """A request whose answer nobody waits for."""
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
    page = tmp_path / "atropos_api" / "http" / "ops.py"
    with running("--store", "data", "--reload", cwd=tmp_path) as (url, process), contextlib.ExitStack() as stack:
        assert httpx.get(f"{url}/livez").json() == {"status": "ok"}
        run = {"name": "kept", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
        httpx.post(f"{url}/v1/runs", json=run)
        ask(url, "/v1/events", stack)
        time.sleep(0.6)
        page.write_text(page.read_text().replace('"ok"', '"changed"'))
        os.utime(page, (time.time() + 5, time.time() + 5))
        wait_for(lambda: httpx.get(f"{url}/livez", timeout=20).json() == {"status": "changed"})
        assert httpx.get(f"{url}/v1/status").json()["run"]["name"] == "kept"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert not answers(url)
