"""A token in a file is replaced while the broker serves: it is read again on SIGHUP, and our clients follow."""

import signal
import subprocess
import sys
import time

import httpx
import pytest

from atropos_api.client import BrokerClient
from atropos_api.common.secrets import TokenSource
from example_trainer.processes.ports import free_port

COMMAND = [sys.executable, "-m", "atropos_api", "--store", "memory"]
FIRST, SECOND = "the-first-token", "the-second-token"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{FIRST}\n")
    return path


@pytest.fixture
def broker(file):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*COMMAND, "--port", str(port), "--token-file", str(file)], stderr=subprocess.PIPE) as it:
        with BrokerClient(url, token=FIRST) as client:
            client.wait_until_ready(30)
        try:
            yield url, it
        finally:
            it.kill()


def status(url, token):
    return httpx.get(f"{url}/status", headers={"Authorization": f"Bearer {token}"}).status_code


def hang_up(process, url, token, wanted):
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 10
    while status(url, token) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_new_token_is_taken_at_a_hangup_and_a_bad_one_changes_nothing(broker, file):
    url, process = broker
    assert (status(url, FIRST), status(url, SECOND), httpx.get(f"{url}/status").status_code) == (200, 401, 401)
    with BrokerClient(url, token=TokenSource(file=file)) as client:
        client.status()
        file.write_text(f"{SECOND}\n")
        assert status(url, FIRST) == 200
        hang_up(process, url, SECOND, 200)
        assert (status(url, FIRST), httpx.get(f"{url}/t/{SECOND}/status").status_code) == (401, 200)
        client.status()
    for text in ("short", "two words", ""):
        file.write_text(text)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert status(url, SECOND) == 200, text
    file.unlink()
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert status(url, SECOND) == 200
    process.terminate()
    log = process.stderr.read().decode()
    assert process.wait(10) == 0
    assert f"{file} was read again: a new token" in log
    assert log.count("the token stays as it was") >= 1
    assert not {FIRST, SECOND} & set(log.split())


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (None, [], "cannot be read"),
        ("short", [], "8 characters or more"),
        ("two words", [], "holds no token"),
        (FIRST, ["--token", SECOND], "are both given"),
    ],
)
def test_what_cannot_be_a_token_is_one_line(file, content, more, said):
    file.unlink() if content is None else file.write_text(content)
    command = [*COMMAND, "--port", "0", "--token-file", str(file), *more]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr
    assert str(file) in result.stderr
    assert SECOND not in result.stderr
