"""Bridges: to the shared vLLM server of the session, to a server that a test may kill, with servers of their own."""

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

from example_trainer.modeling.loading import PolicyOptions
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights.restart import RestartBridge, RestartOptions
from example_trainer.weights.shared_vllm import SharedOptions, SharedVllmBridge


@pytest.fixture
def bridge_to() -> Iterator[Callable[..., SharedVllmBridge]]:
    """A function from a server to a bridge; bridges are closed with the test."""
    made: list[SharedVllmBridge] = []

    def make(server: Any, *, policy: dict[str, Any] | None = None, **settings: Any) -> SharedVllmBridge:
        options = SharedOptions(
            policy=PolicyOptions(model_name=str(server.model), **(policy or {})),
            server_url=server.url,
            manifest_path=str(server.manifest_path),
            wait_timeout_seconds=120.0,
            **settings,
        )
        made.append(SharedVllmBridge(options))
        return made[-1]

    yield make
    for bridge in made:
        bridge.close()


class RestartableServer:
    """A vLLM server that keeps its port and its manifest's place when it is started again."""

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
    """Two free ports, one next to the other."""
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
    """A function that makes a bridge with servers of its own; they are ended with the test, and nothing is left."""
    made: list[RestartBridge] = []
    before = set(psutil.Process().children(recursive=True))

    def make(*, policy: dict[str, Any] | None = None, **settings: Any) -> RestartBridge:
        vllm = VllmOptions(
            port=neighbours[0],
            log_path=tmp_path / "logs" / "vllm.log",
            served_model_name="policy",
            tokenizer=str(tiny_qwen2),
            max_model_len=4096,
            drain_seconds=1.0,
            extra_arguments=("--kv-cache-memory-bytes", str(64 << 20)),
        )
        options = PolicyOptions(model_name=str(tiny_qwen2), dtype="float32", **(policy or {}))
        made.append(
            RestartBridge(RestartOptions(policy=options, vllm=vllm, weights_dir=tmp_path / "served", **settings))
        )
        return made[-1]

    yield make
    for bridge in made:
        bridge.close()
    assert set(psutil.Process().children(recursive=True)) <= before
