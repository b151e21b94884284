"""Programs may be started in any order: a trainer that finds a server still loading waits for it and starts none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch

from example_trainer.errors import ServerUnavailable
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights import lora_only
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.testing import config_of

PROGRAM = (sys.executable, "-m", "example_trainer.serving.testing")


@pytest.fixture
def bridge_to(tmp_path, monkeypatch):
    """A function that makes a bridge to a port, which starts a server there if it finds none."""
    made = []
    policy = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(lora_only, "load_policy", lambda _: policy)
    monkeypatch.setattr(lora_only, "stored_config", lambda _: None)

    def make(port):
        usual = {"weight_bridge_mode": "lora_only", "run_dir": tmp_path, "wait_timeout": 60.0}
        config = config_of(f"http://127.0.0.1:{port}", "m", **usual)
        made.append(LoraOnlyBridge(config, vllm=replace(VllmOptions.of(config), program=PROGRAM)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def starting():
    """The port of a server that was started by hand and is still loading."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*PROGRAM, "--port", str(port), "--policy-version", "7", "--load-seconds", "1"]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while (status := _health(port)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status == 503
    yield port
    process.kill()
    process.wait()


def _health(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.HTTPError:
        return None


def test_a_server_that_is_starting_is_waited_for_and_no_second_one_started(bridge_to, starting, tmp_path):
    bridge = bridge_to(starting)
    bridge.prepare()
    assert bridge.highest_version() == 7
    assert bridge._manager is None
    assert not (tmp_path / "vllm.log").exists()


def test_of_two_that_find_no_server_the_one_that_is_late_uses_the_others(bridge_to, starting, monkeypatch, tmp_path):
    look, looks = lora_only.is_served, []

    def look_too_early(url):
        looks.append(url)
        return len(looks) > 1 and look(url)

    monkeypatch.setattr(lora_only, "is_served", look_too_early)
    bridge = bridge_to(starting)
    bridge.prepare()
    assert bridge.highest_version() == 7
    assert bridge._manager is None
    assert not (tmp_path / "vllm.log").exists()


def test_a_port_that_something_else_holds_is_reported_with_its_holder(bridge_to):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        hanging_up = threading.Thread(target=_hang_up, args=(stranger,))
        hanging_up.start()
        with pytest.raises(ServerUnavailable, match=r"is taken by pid .* choose another with --vllm-port"):
            bridge_to(stranger.getsockname()[1]).prepare()
        stranger.shutdown(socket.SHUT_RDWR)
        hanging_up.join(10)


def _hang_up(stranger):
    """Accept and close connections until the socket is shut down."""
    try:
        while True:
            stranger.accept()[0].close()
    except OSError:
        pass
