"""Bridges to the session's shared vLLM server, to a server that a test may kill, or with servers of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of


@pytest.fixture
def bridge_to() -> Iterator[Callable[..., SharedVllmBridge]]:
    """A function that makes a bridge to a server; bridges are closed at the end of the test."""
    made: list[SharedVllmBridge] = []

    def make(server: Any, *, lease_seconds: float = 30.0, **settings: Any) -> SharedVllmBridge:
        usual = {"vllm_config_path": str(server.manifest_path), "wait_timeout": 120.0}
        config = config_of(server.url, server.model, **usual | settings)
        made.append(SharedVllmBridge(config, lease_seconds=lease_seconds))
        return made[-1]

    yield make
    for bridge in made:
        bridge.close()


class RestartableServer:
    """A vLLM server that keeps its port and its manifest's path when it is started again."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.manifest_path = directory / "vllm_bridge_config.json"
        self.log_path = directory / "log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "example_trainer.vllm_api_server",
            "--model",
            str(self.model),
            "--share-weights",
        ]
        command += ["--port", str(self.port), "--bridge-dir", str(self.log_path.parent)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--kv-cache-memory-bytes", str(64 << 20), *flags],
                cwd=Path(__file__).resolve().parents[3],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)


@pytest.fixture
def restartable_server(tiny_qwen2: Path, tmp_path: Path) -> Iterator[RestartableServer]:
    server = RestartableServer(tiny_qwen2, tmp_path)
    yield server
    server.stop()


@pytest.fixture
def neighbours() -> tuple[int, int]:
    """Return two free ports next to each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return port, port + 1


@pytest.fixture
def bridge_for(tiny_qwen2: Path, tmp_path: Path, neighbours: tuple[int, int]) -> Iterator[Callable[..., RestartBridge]]:
    """A function that makes a bridge with servers of its own; they end with the test and leave nothing."""
    made: list[RestartBridge] = []
    before = set(psutil.Process().children(recursive=True))

    def make(**settings: Any) -> RestartBridge:
        usual = {"weight_bridge_mode": "none", "run_dir": tmp_path, "dtype": "float32", "drain_seconds": 1.0}
        config = config_of(f"http://127.0.0.1:{neighbours[0]}", tiny_qwen2, **usual | settings)
        made.append(RestartBridge(config, VllmOptions.of(config).with_settings(kv_cache_memory_bytes=64 << 20)))
        return made[-1]

    yield make
    for bridge in made:
        bridge.close()
    assert set(psutil.Process().children(recursive=True)) <= before
