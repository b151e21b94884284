"""Measures a sync in each mode: the time from the optimizer's step to the new policy's first token, and lost decoding.

One server after the other, the same load on each. For each mode: seconds from the change of the masters to the first
token sampled under the new version; tokens per CPU second of the server in a window of three seconds without a sync,
and in one with it (longer where the sync is); for how long nothing was answered; copies of the weights beside the
trainer's own; tokens wasted, that is computed again or asked for again. The figures that the trainers' guides give for
their modes stand beside ours; those were measured on GPUs with models of billions of parameters, ours on the demo's
base on a CPU: the order of the modes can be compared.

Decoding between syncs is shown as a share of the first mode's, the guides' in brackets as one of their shared mode's.

    python benchmarks/sync/modes.py [--syncs 3] [--modes shared_vllm lora_only lora_restart none reload]
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
from harness import ADAPTER, PROMPT, SAMPLES, SERVE_ADAPTERS, TOKENS, Load, Server, base_model, free_port, server, shift
from harness import policy_options as policy_of

from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.lora_only import HotswapOptions, LoraHotswapBridge
from example_trainer.weights.restart import RestartBridge, RestartOptions
from example_trainer.weights.shared_vllm import SharedOptions, SharedVllmBridge

WINDOW_SECONDS = 3.0
GUIDES = {"shared_vllm": "0 s", "lora_only": "1-5 s", "lora_restart": "about 45 s", "none": "30-60 s", "reload": "-"}
COPIES = {"shared_vllm": "0", "lora_only": "adapter", "lora_restart": "adapter on disk", "none": "1 on disk, 1 served"}
COPIES["reload"] = COPIES["none"]
GUIDES_DECODING = {"shared_vllm": 172, "lora_only": 13, "lora_restart": 108, "none": 172, "reload": 172}
"""Tokens a second between syncs; the one of `lora_only` is that of a server without CUDA graphs, which ours keeps."""


@dataclass(slots=True)
class Figures:
    """Of one mode, a value for each sync."""

    to_first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    recomputed_tokens: int = 0
    asked_again: int = 0

    def row(self, mode: str, first: float) -> str:
        """A line of the table; `first` is the rate between syncs of the first mode."""
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
        manifest = str(Path(directory) / "vllm_bridge_config.json")
        options = SharedOptions(
            policy=policy_of(model), server_url=running.url, manifest_path=manifest, forwards_from_masters=True
        )
        yield SharedVllmBridge(options), running.url


@contextlib.contextmanager
def hotswap(model: Path, directory: str) -> Iterator[tuple[WeightBridge, str]]:
    with server(model, directory, *SERVE_ADAPTERS) as running:
        options = HotswapOptions(
            policy=policy_of(model, ADAPTER), server_url=running.url, adapters_dir=Path(directory) / "served"
        )
        yield LoraHotswapBridge(options), running.url


@contextlib.contextmanager
def restarting(model: Path, directory: str, mode: str) -> Iterator[tuple[WeightBridge, str]]:
    port = free_port()
    vllm = VllmOptions(
        port=port,
        log_path=Path(directory) / "server.log",
        served_model_name=str(model),
        tokenizer=str(model),
        max_model_len=512,
        drain_seconds=0.5,
    )
    yield (
        RestartBridge(
            RestartOptions(
                policy=policy_of(model, ADAPTER if mode == "lora_restart" else None),
                vllm=vllm,
                weights_dir=Path(directory) / "served",
                method="reload" if mode == "reload" else "restart",
                adapter_arguments=SERVE_ADAPTERS,
            )
        ),
        f"http://127.0.0.1:{port}",
    )


MODES: dict[str, Callable[[Path, str], contextlib.AbstractContextManager[tuple[WeightBridge, str]]]] = {
    "shared_vllm": shared,
    "lora_only": hotswap,
    "lora_restart": lambda model, directory: restarting(model, directory, "lora_restart"),
    "none": lambda model, directory: restarting(model, directory, "none"),
    "reload": lambda model, directory: restarting(model, directory, "reload"),
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


class Publishing:
    """A publish under way in a thread of its own."""

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
    """Until the first token of the new version, or as long as a window without a sync: a swap is too short to count."""
    first_token(url, version)
    figures.to_first_token.append(time.monotonic() - began)
    time.sleep(max(0.0, began + WINDOW_SECONDS - time.monotonic()))


def first_token(url: str, version: int) -> None:
    """Ask for single tokens until one is of the new version."""
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
    """Tokens per CPU second of whatever listens at `url`, over the time that `wait` takes."""
    before = cpu_by_process(url)
    tokens = load.tokens
    wait()
    after = cpu_by_process(url)
    spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    return (load.tokens - tokens) / spent if spent > 0 else 0.0


def cpu_by_process(url: str) -> dict[int, float]:
    """CPU seconds so far of each process of the servers that this program, or its bridge, has started."""
    port = url.rpartition(":")[2]
    found: dict[int, float] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if port in child.cmdline():
                found |= {each.pid: sum(each.cpu_times()[:2]) for each in Server(url, child).tree()}
    return found


if __name__ == "__main__":
    main()
