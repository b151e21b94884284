"""Measures publishes of adapters: the time of one, the decoding speed it costs, and the growth of the server's memory.

Two servers of the same adapter run in turns under the same load: one gets a new adapter every 0.25 s, the other never.
Then one of them gets some hundred adapters in a row under load, while the memory of its processes is measured. Each row
ends with the promised bound and whether it was met; the promise of 50 ms is for an idle machine.

    python benchmarks/sync/lora_only.py [--windows 5] [--seconds 3] [--swaps 500]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from harness import PROMPT, SERVE_ADAPTERS, Load, Server, base_model, server, shift, trainer

from example_trainer.weights.lora_only import LoraOnlyBridge

SWAP_INTERVAL_SECONDS = 0.25
MEBIBYTE = 1 << 20
MOST_SECONDS = 0.05
LEAST_RATIO = 0.9
MOST_OF_THE_ADAPTERS = 0.02
"""Largest memory growth over the second half of the swaps, as a share of their adapters; keeping each would be 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=5, help="windows on each server")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--swaps", type=int, default=600)
    asked = parser.parse_args()
    model = base_model()
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        server(model, one, *SERVE_ADAPTERS) as updated,
        server(model, other, *SERVE_ADAPTERS) as still,
        contextlib.closing(Publisher(model, updated, one)) as publisher,
        contextlib.closing(Publisher(model, still, other)),
    ):
        idle(publisher, updated)
        decoding(publisher, updated, still, windows=asked.windows, seconds=asked.seconds)
        many(publisher, updated, swaps=asked.swaps)


def row(what: str, measured: str, promised: str = "", met: bool = True) -> None:
    verdict = f"{promised:34} {'met' if met else 'MISSED'}" if promised else ""
    print(f"{what:58} {measured:46} {verdict}".rstrip(), flush=True)


class Publisher:
    """A trainer that only publishes: its bridge and policy, with the first adapter published."""

    def __init__(self, model: Path, to: Server, directory: str) -> None:
        self._bridge = LoraOnlyBridge(trainer(to.url, model, directory, mode="lora_only"))
        self._policy = self._bridge.prepare()
        self.version = 0
        self.publish()

    def publish(self) -> int:
        self.version += 1
        shift(self._policy, self.version)
        self._bridge.publish(self.version)
        return self.version

    def close(self) -> None:
        self._bridge.close()


def idle(publisher: Publisher, updated: Server, *, times: int = 30) -> None:
    publishes, firsts = [], []
    for _ in range(times):
        began = time.monotonic()
        version = publisher.publish()
        publishes.append(time.monotonic() - began)
        body = {"prompt": PROMPT, "max_tokens": 1, "compact": True}
        told = httpx.post(f"{updated.url}/generate", json=body).json()
        firsts.append(time.monotonic() - began)
        assert told["policy_versions"] == [[[0, 1, version]]]
    met = statistics.median(publishes) <= MOST_SECONDS
    row(f"publish, idle server, {times} swaps", spread(publishes), f"median at most {MOST_SECONDS * 1e3:.0f} ms", met)
    row("optimizer's step to the first token of the new policy", spread(firsts))


def decoding(publisher: Publisher, updated: Server, still: Server, *, windows: int, seconds: float) -> None:
    """Measure windows with and without swaps, in turns."""
    rates: dict[str, list[float]] = {"updated": [], "still": []}
    took: list[float] = []
    for _ in range(windows):
        rates["still"].append(window(still, seconds, None, took))
        rates["updated"].append(window(updated, seconds, publisher, took))
    with_swaps, without = (statistics.median(rates[name]) for name in ("updated", "still"))
    ratio = with_swaps / without
    row(f"publish, decoding server, {len(took)} swaps", spread(took))
    row(
        "tokens per CPU second, a swap every 0.25 s to none",
        f"{with_swaps:.0f} to {without:.0f}: {ratio:.3f}",
        f"at least {LEAST_RATIO}",
        ratio >= LEAST_RATIO,
    )


def window(on: Server, seconds: float, publisher: Publisher | None, took: list[float]) -> float:
    """Return the tokens per CPU second of the server under load."""
    with Load(on.url) as load:
        time.sleep(0.5)
        tokens, cpu, ends = load.tokens, on.cpu_seconds(), time.monotonic() + seconds
        while time.monotonic() < ends:
            if publisher is not None:
                began = time.monotonic()
                publisher.publish()
                took.append(time.monotonic() - began)
            time.sleep(SWAP_INTERVAL_SECONDS)
        return float((load.tokens - tokens) / (on.cpu_seconds() - cpu))


def many(publisher: Publisher, updated: Server, *, swaps: int) -> None:
    """Swap many times under load, and measure the growth of memory over the second half of the swaps."""
    seen: dict[int, int] = {}
    with Load(updated.url):
        for number in range(1, swaps + 1):
            publisher.publish()
            if number in (swaps // 2, swaps):
                seen[number] = updated.private_bytes()
    told = updated.debug()
    adapter_bytes = told["adapter_bytes"] / told["adapters_in_memory"]
    half, whole = seen.values()
    left = (whole - half) / (swaps - swaps // 2) / adapter_bytes
    row(
        f"memory after {swaps // 2} swaps, and after {swaps}",
        f"{half / MEBIBYTE:.0f} MiB, {(whole - half) / MEBIBYTE:+.1f}: {left:.1%} of the adapters",
        f"at most {MOST_OF_THE_ADAPTERS:.0%}",
        left <= MOST_OF_THE_ADAPTERS,
    )
    loads = told["adapter_disk_loads_total"]
    row("adapters read from a disk", str(loads), "none", loads == 0)


def spread(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    return f"{statistics.median(ranked) * 1e3:.0f} ms (90 % under {ranked[int(len(ranked) * 0.9)] * 1e3:.0f})"


if __name__ == "__main__":
    main()
