"""A bridge to the shared vLLM server of the session, and a server that a test may kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from example_trainer.model import PolicyOptions
from example_trainer.weights.shared import SharedOptions, SharedVllmBridge


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
