"""Hot-swapping adapters, measured: how fast a publish is, what it takes from decoding, and whether anything piles up.

Two servers of the same adapter run in turns under the same load: one gets a new adapter every 0.25 s, the other never.
Then one of them gets some hundred adapters in a row. What is promised: a median publish under 50 ms on the tiny model
(with nothing else on the machine), decoding within a tenth of the server that never swaps, no memory that grows, and no
adapter read from a disk.

    python benchmarks/sync/hotswap.py [--windows 6] [--seconds 4] [--swaps 500]
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
from harness import ADAPTER, PROMPT, SERVE_ADAPTERS, Load, Server, base_model, policy_options, server, shift

from example_trainer.weights.lora_hotswap import HotswapOptions, LoraHotswapBridge

SWAP_INTERVAL_SECONDS = 0.25
MEBIBYTE = 1 << 20
SETTLED_AFTER = 50


KV_CACHE = ("--kv-cache-memory-bytes", str(48 * MEBIBYTE))
"""Small, so that all its pages have been touched before memory is compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6, help="windows on each server")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--swaps", type=int, default=500)
    asked = parser.parse_args()
    model = base_model()
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        server(model, one, *SERVE_ADAPTERS, *KV_CACHE) as swapping,
        server(model, other, *SERVE_ADAPTERS, *KV_CACHE) as still,
        contextlib.closing(Swapper(model, swapping, one)) as swapper,
        contextlib.closing(Swapper(model, still, other)),
    ):
        idle(swapper, swapping)
        decoding(swapper, swapping, still, windows=asked.windows, seconds=asked.seconds)
        many(swapper, swapping, swaps=asked.swaps)


class Swapper:
    """A trainer reduced to publishing: its bridge and policy, the first adapter published."""

    def __init__(self, model: Path, to: Server, directory: str) -> None:
        options = HotswapOptions(
            policy=policy_options(model, ADAPTER), server_url=to.url, adapters_dir=Path(directory) / "served"
        )
        self._bridge = LoraHotswapBridge(options)
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


def idle(swapper: Swapper, swapping: Server, *, times: int = 30) -> None:
    publishes, firsts = [], []
    for _ in range(times):
        began = time.monotonic()
        version = swapper.publish()
        publishes.append(time.monotonic() - began)
        body = {"prompt": PROMPT, "max_tokens": 1, "compact": True}
        told = httpx.post(f"{swapping.url}/generate", json=body).json()
        firsts.append(time.monotonic() - began)
        assert told["policy_versions"] == [[[0, 1, version]]]
    print(f"idle, {times} swaps: publish {spread(publishes)}, to the first token of the new policy {spread(firsts)}")


def decoding(swapper: Swapper, swapping: Server, still: Server, *, windows: int, seconds: float) -> None:
    """Windows with and without swaps take turns."""
    rates: dict[str, list[float]] = {"swapping": [], "still": []}
    took: list[float] = []
    for _ in range(windows):
        rates["still"].append(window(still, seconds, None, took))
        rates["swapping"].append(window(swapping, seconds, swapper, took))
    with_swaps, without = (statistics.median(rates[name]) for name in ("swapping", "still"))
    print(
        f"under load, {len(took)} swaps: publish {spread(took)}; decoding {with_swaps:.0f} tokens per CPU second with "
        f"swaps, {without:.0f} without: ratio {with_swaps / without:.3f} (promised: at least 0.9)"
    )


def window(on: Server, seconds: float, swapper: Swapper | None, took: list[float]) -> float:
    """Tokens per CPU second of the server while a load runs on it."""
    with Load(on.url) as load:
        time.sleep(0.5)
        tokens, cpu, ends = load.tokens, on.cpu_seconds(), time.monotonic() + seconds
        while time.monotonic() < ends:
            if swapper is not None:
                began = time.monotonic()
                swapper.publish()
                took.append(time.monotonic() - began)
            time.sleep(SWAP_INTERVAL_SECONDS)
        return float((load.tokens - tokens) / (on.cpu_seconds() - cpu))


def many(swapper: Swapper, swapping: Server, *, swaps: int) -> None:
    """Swap in a row under load; memory is looked at once everything has been in use for a while."""
    with Load(swapping.url):
        for _ in range(SETTLED_AFTER):
            swapper.publish()
        seen = [swapping.private_bytes()]
        for number in range(swaps - SETTLED_AFTER):
            swapper.publish()
            if number in {(swaps - SETTLED_AFTER) // 2, swaps - SETTLED_AFTER - 1}:
                seen.append(swapping.private_bytes())
    told = swapping.debug()
    first, middle, last = (each / MEBIBYTE for each in seen)
    print(
        f"{swaps} swaps in a row: {first:.0f} MiB after {SETTLED_AFTER}, {middle - first:+.1f} MiB half way and "
        f"{last - middle:+.1f} MiB from there to the end; "
        f"an adapter has {told['adapter_bytes'] / told['adapters_in_memory'] / MEBIBYTE:.2f} MiB; "
        f"{told['adapters_in_memory']} kept; read from a disk: {told['adapter_disk_loads_total']}"
    )


def spread(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    return f"{statistics.median(ranked) * 1e3:.0f} ms (90 % under {ranked[int(len(ranked) * 0.9)] * 1e3:.0f})"


if __name__ == "__main__":
    main()
