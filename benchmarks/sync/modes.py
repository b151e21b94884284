"""Measures a sync in each mode: time from the optimizer step to the new policy's first token, and lost decoding.

One server after the other, the same load on each. For each mode: seconds from the change of the masters to the first
token sampled under the new version; tokens per CPU second of the server in a window of three seconds without a sync,
and in one with it (longer if the sync is); the longest time without an answer; copies of the weights beside the
trainer's own; tokens that were computed or requested again. The figures that the trainers' guides give for their modes
are printed next to ours; those are from GPUs and models of billions of parameters, ours from the demo's base on a CPU,
so only the order of the modes can be compared. `no_standby` is `none` with `--no-standby-server`.

Decoding between syncs is a share of the first mode's, and in brackets the guides' share of their shared mode's.

    python benchmarks/sync/modes.py [--syncs 3] [--modes shared_vllm lora_only lora_restart none no_standby reload]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
from harness import PROMPT, SAMPLES, SERVE_ADAPTERS, TOKENS, Load, Server, base_model, free_port, server, shift, trainer

from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared_vllm import SharedVllmBridge

WINDOW_SECONDS = 3.0
IDLE_CPU_SECONDS = 0.1
GUIDES = {"shared_vllm": "0 s", "lora_only": "1-5 s", "lora_restart": "about 45 s", "none": "30-60 s"}
GUIDES |= {"no_standby": GUIDES["none"], "reload": "-"}
COPIES = {"shared_vllm": "0", "lora_only": "adapter", "lora_restart": "adapter on disk", "none": "1 on disk, 1 served"}
COPIES["reload"] = COPIES["no_standby"] = COPIES["none"]
GUIDES_DECODING = {
    "shared_vllm": 172,
    "lora_only": 13,
    "lora_restart": 108,
    "none": 172,
    "no_standby": 172,
    "reload": 172,
}
"""Tokens per second between syncs; for `lora_only` of a server without CUDA graphs, which ours keeps."""


@dataclass(slots=True)
class Figures:
    """One mode's figures, a value for each sync."""

    to_first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    recomputed_tokens: int = 0
    asked_again: int = 0

    def row(self, mode: str, first: float) -> str:
        """Return a line of the table; `first` is the first mode's rate between syncs."""
        decoding = statistics.median(self.between) / first
        wasted = f"{self.recomputed_tokens} recomputed, {self.asked_again * SAMPLES * TOKENS} at most asked again"
        return (
            f"{mode:13} {statistics.median(self.to_first_token):9.3f} s {GUIDES[mode]:>11} "
            f"{decoding:6.2f} ({GUIDES_DECODING[mode] / GUIDES_DECODING['shared_vllm']:.2f}) "
            f"{statistics.median(self.between):9.0f} {statistics.median(self.during):9.0f} "
            f"{statistics.median(self.gaps):7.2f} s  {COPIES[mode]:20} {wasted}"
        )


@contextlib.contextmanager
def shared(model: Path, directory: str) -> Iterator[tuple[WeightBridge, str]]:
    with server(model, directory, "--share-weights") as running:
        config = trainer(running.url, model, directory, mode="shared_vllm", forward_weights="masters")
        yield SharedVllmBridge(config), running.url


@contextlib.contextmanager
def lora_only(model: Path, directory: str) -> Iterator[tuple[WeightBridge, str]]:
    with server(model, directory, *SERVE_ADAPTERS) as running:
        yield LoraOnlyBridge(trainer(running.url, model, directory, mode="lora_only")), running.url


@contextlib.contextmanager
def restarting(
    model: Path, directory: str, mode: str, method: str = "restart", *, standby: bool = True
) -> Iterator[tuple[WeightBridge, str]]:
    url = f"http://127.0.0.1:{free_port()}"
    config = trainer(url, model, directory, mode=mode, max_model_len=512, restart_method=method, standby_server=standby)
    yield RestartBridge(config), url


MODES: dict[str, Callable[[Path, str], contextlib.AbstractContextManager[tuple[WeightBridge, str]]]] = {
    "shared_vllm": shared,
    "lora_only": lora_only,
    "lora_restart": lambda model, directory: restarting(model, directory, "lora_restart"),
    "none": lambda model, directory: restarting(model, directory, "none"),
    "no_standby": lambda model, directory: restarting(model, directory, "none", standby=False),
    "reload": lambda model, directory: restarting(model, directory, "none", "reload"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    asked = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    model = base_model()
    print("mode           to 1st token the guides'    decoding    tokens per CPU second      without   copies of the")
    print("                                       (the guides')   between    during          answer   weights   wasted")
    first = None
    for mode in asked.modes:
        with tempfile.TemporaryDirectory() as directory, MODES[mode](model, directory) as (bridge, url):
            try:
                figures = measure(bridge, url, syncs=asked.syncs)
            finally:
                bridge.close()
        first = first or statistics.median(figures.between)
        print(figures.row(mode, first), flush=True)


def measure(bridge: WeightBridge, url: str, *, syncs: int) -> Figures:
    policy = bridge.prepare()
    version = bridge.highest_version() + 1
    bridge.publish(version)
    figures = Figures()
    for _ in range(syncs):
        wait_until_idle(url)
        with Load(url) as load:
            time.sleep(0.5)
            figures.between.append(rate(url, load, partial(time.sleep, WINDOW_SECONDS)))
            began = time.monotonic()
            shift(policy, version)
            version += 1
            publishing = Publishing(bridge, version)
            figures.during.append(rate(url, load, partial(sync_window, url, version, began, figures)))
        report = publishing.report()
        figures.gaps.append(report.fence_seconds)
        figures.recomputed_tokens += report.recomputed_tokens
        figures.asked_again += load.unanswered
    return figures


def wait_until_idle(url: str) -> None:
    """Wait until no process of the servers computes: a standby has then imported everything."""
    busy = True
    while busy:
        before = cpu_by_process(url)
        time.sleep(1.0)
        after = cpu_by_process(url)
        busy = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items()) > IDLE_CPU_SECONDS


class Publishing:
    """A publish that runs in a thread of its own."""

    def __init__(self, bridge: WeightBridge, version: int) -> None:
        self._report: PublishReport | None = None
        self._thread = threading.Thread(target=self._run, args=(bridge, version))
        self._thread.start()

    def _run(self, bridge: WeightBridge, version: int) -> None:
        self._report = bridge.publish(version)

    def report(self) -> PublishReport:
        self._thread.join()
        if self._report is None:
            raise SystemExit("the publish failed")
        return self._report


def sync_window(url: str, version: int, began: float, figures: Figures) -> None:
    """Measure until the new version's first token, but at least as long as a window without a sync."""
    first_token(url, version)
    figures.to_first_token.append(time.monotonic() - began)
    time.sleep(max(0.0, began + WINDOW_SECONDS - time.monotonic()))


def first_token(url: str, version: int) -> None:
    """Request single tokens until one has the new version."""
    body = {"prompt": PROMPT, "max_tokens": 1, "compact": True}
    while True:
        try:
            answer = httpx.post(f"{url}/generate", json=body, timeout=60)
        except httpx.HTTPError:
            time.sleep(0.02)
            continue
        if answer.is_success and answer.json()["policy_versions"] == [[[0, 1, version]]]:
            return
        time.sleep(0.005)


def rate(url: str, load: Load, wait: Callable[[], None]) -> float:
    """Return the tokens per CPU second of the server at `url`, over the time that `wait` takes."""
    before = cpu_by_process(url)
    tokens = load.tokens
    wait()
    after = cpu_by_process(url)
    spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    return (load.tokens - tokens) / spent if spent > 0 else 0.0


def cpu_by_process(url: str) -> dict[int, float]:
    """Return the CPU seconds so far of each process of the servers that this program or its bridge started."""
    port = url.rpartition(":")[2]
    found: dict[int, float] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if port in child.cmdline():
                found |= {each.pid: sum(each.cpu_times()[:2]) for each in Server(url, child).tree()}
    return found


if __name__ == "__main__":
    main()
