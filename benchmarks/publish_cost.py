"""What publishing costs the server: decoded tokens per second with a publish every 0.25 s against none, in one run.

Starts the vLLM server on the demo's base model with its weights shared, keeps 16 requests of 8 samples and 32 tokens
in flight, and lets windows with and without publishes take turns. Prints medians, their ratio and a publish's pause.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx

from example_trainer.model import PolicyOptions
from example_trainer.tiny.cache import ensure_base
from example_trainer.weights.shared import SharedOptions, SharedVllmBridge

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8] * 6 + [9, 10]  # 26 tokens, as the demo's
REQUESTS, SAMPLES, TOKENS = 16, 8, 32
PUBLISH_INTERVAL_SECONDS = 0.25


@contextlib.contextmanager
def server(model: Path, directory: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "example_trainer.vllm_api_server", "--model", str(model), "--port", str(port)]
    command += ["--share-weights", "--bridge-dir", directory, "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", str(REQUESTS * SAMPLES)]
    log = (Path(directory) / "server.log").open("wb")
    with log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


class Load:
    """Keeps the same number of requests in flight and counts the tokens that came back."""

    def __init__(self, url: str) -> None:
        self.tokens = 0
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(REQUESTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"prompt": {"prompt_token_ids": PROMPT}, "n": SAMPLES, "max_tokens": TOKENS, "compact": True}
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                answer = client.post(f"{self._url}/generate", json=body | {"ignore_eos": True}).raise_for_status()
                with self._lock:
                    self.tokens += sum(len(row) for row in answer.json()["token_ids"])


def window(load: Load, seconds: float, publish: SharedVllmBridge | None, fences: list[float]) -> float:
    """Tokens per second over a window, with publishes on their interval when a bridge is given."""
    started, before = time.monotonic(), load.tokens
    while (elapsed := time.monotonic() - started) < seconds:
        if publish is None:
            time.sleep(min(PUBLISH_INTERVAL_SECONDS, seconds - elapsed))
            continue
        next_publish = time.monotonic() + PUBLISH_INTERVAL_SECONDS
        fences.append(publish.publish(publish.highest_version() + 1).fence_seconds)
        time.sleep(max(0.0, next_publish - time.monotonic()))
    return (load.tokens - before) / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = ensure_base("chain")
    with tempfile.TemporaryDirectory() as directory, server(model, directory) as url:
        options = SharedOptions(
            policy=PolicyOptions(model_name=str(model), dtype="float32"),
            server_url=url,
            manifest_path=str(Path(directory) / "vllm_bridge_config.json"),
            forwards_from_masters=True,
            drain_seconds=5.0,
        )
        bridge = SharedVllmBridge(options)
        bridge.prepare()
        bridge.publish(bridge.highest_version() + 1)
        quiet, published, fences = [], [], []
        with Load(url) as load:
            window(load, 2.0, None, [])  # the first seconds are slow
            for _ in range(arguments.windows):
                quiet.append(window(load, arguments.seconds, None, fences))
                published.append(window(load, arguments.seconds, bridge, fences))
        bridge.close()
    without, with_publishes = statistics.median(quiet), statistics.median(published)
    print(f"without publishes          {without:10,.0f} tokens/s")
    print(
        f"a publish every {PUBLISH_INTERVAL_SECONDS} s      {with_publishes:10,.0f} tokens/s, {len(fences)} publishes"
    )
    print(f"ratio                      {with_publishes / without:10.2f}")
    print(f"fence, median              {statistics.median(fences):10.2f} s")


if __name__ == "__main__":
    main()
