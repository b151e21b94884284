"""Shared parts of the sync benchmarks: servers of the demo's base model, load on them, and their CPU time.

The machine may be busy with other things, so speeds are given per CPU second of the server's processes, and two servers
that are compared take turns within one run.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import torch

from example_trainer.config import TrainingConfig
from example_trainer.modeling.policy import Policy
from example_trainer.tiny.cache import ensure_base
from example_trainer.weights.testing import config_of

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8] * 6 + [9, 10]  # 26 tokens, as the demo's
REQUESTS, SAMPLES, TOKENS = 8, 8, 32
ADAPTER = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
SERVE_ADAPTERS = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "4")


def base_model() -> Path:
    return Path(ensure_base("chain", seed=0))


def trainer(url: str, model: Path, directory: str, *, mode: str, **changes: Any) -> TrainingConfig:
    """Return a trainer's configuration in a mode; its server is at `url` and has its manifest in `directory`."""
    usual = {"weight_bridge_mode": mode, "run_dir": Path(directory), "dtype": "float32"}
    usual |= ADAPTER if mode.startswith("lora") else {}
    usual |= {"vllm_config_path": str(Path(directory) / "vllm_bridge_config.json")} if mode == "shared_vllm" else {}
    return config_of(url, model, **usual | changes)


def shift(policy: Policy, seed: int) -> None:
    """Change the weights as a small optimizer step does, so that no publish is a repeat."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(torch.randn(master.shape, generator=noise) * 1e-4)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and its processes."""

    url: str
    process: psutil.Process

    def tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        return float(sum(times.user + times.system for times in (each.cpu_times() for each in self.tree())))

    def private_bytes(self) -> int:
        """Return the memory that would be free without these processes."""
        return int(sum(each.memory_full_info().uss for each in self.tree()))

    def debug(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/bridge/debug", timeout=60).json()
        return answer


@contextlib.contextmanager
def server(model: Path, directory: str, *flags: str) -> Iterator[Server]:
    """Run a vLLM server of ours on a free port; it is healthy when the block begins."""
    port = free_port()
    command = [sys.executable, "-m", "example_trainer.vllm_api_server", "--model", str(model), "--port", str(port)]
    command += ["--bridge-dir", directory, "--dtype", "float32", "--max-model-len", "512", *flags]
    with (Path(directory) / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if process.poll() is not None:
                last = (Path(directory) / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"the server ended with {process.returncode}:\n{last}")
            time.sleep(0.2)
        yield Server(url, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(30)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


class Load:
    """Keeps the same number of requests in flight, waits while a server is down, and counts the answers."""

    def __init__(self, url: str, *, tokens: int = TOKENS) -> None:
        self.tokens = 0
        self.unanswered = 0
        """Number of requests that had to be repeated."""
        self.versions: set[int | None] = set()
        self._url = url
        self._length = tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(REQUESTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        body = {"prompt": PROMPT, "n": SAMPLES, "max_tokens": self._length, "ignore_eos": True, "logprobs": 0}
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post("/generate", json={**body, "compact": True})
                except httpx.HTTPError:
                    answer = None
                self._note(answer)

    def _note(self, answer: httpx.Response | None) -> None:
        if answer is None or not answer.is_success:
            with self._lock:
                self.unanswered += 1
            time.sleep(0.1)
            return
        told = answer.json()
        with self._lock:
            self.tokens += sum(map(len, told["token_ids"]))
            self.versions |= {span[2] for spans in told["policy_versions"] for span in spans}
