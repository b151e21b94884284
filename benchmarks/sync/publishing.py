"""Measures publishing into shared tensors: its duration, and the decoding speed it costs.

One server on the demo's base model, 128 requests in flight. Windows without and with a publish asked for every 0.25 s
take turns in the order A B B A, so that other load on the machine affects both; the ratio is the median over
neighbouring windows. Tokens are counted by the server. A publish that has to wait for the one before, or for the budget
of recomputed tokens, is tried again with the next; the number made is printed. The silence is the longest time, in all
windows with publishes, in which none of 16 streaming requests of the 128 got a token.

    python benchmarks/sync/publishing.py [--pairs 4] [--seconds 5] [--lengths 32 200]

Every row has its bound and whether it was met, in wall time. On a busy machine, look at the first row's CPU time and at
the ratios per CPU second instead: they show what is computed again, without waiting times (the drain's limit is half a
second, in which 128 outputs of 32 tokens end on a free machine).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
from harness import Server, base_model, server, shift, trainer
from in_flight import InFlight, in_flight

from example_trainer.modeling.policy import Policy
from example_trainer.weights.shared_vllm import SharedVllmBridge

REQUESTS = 128
INTERVAL_SECONDS = 0.25
IDLE_SECONDS = 0.060
SILENCE_SECONDS = 1.0
LEAST_RATIO = {32: 0.9, 200: 0.5}


@dataclass(slots=True)
class Publisher:
    """A trainer that only publishes: its bridge, its policy, and its current version."""

    bridge: SharedVllmBridge
    policy: Policy
    version: int = 0
    since_publish: int = 0

    def publish(self) -> None:
        self.version += 1
        self.since_publish = 0
        shift(self.policy, self.version)
        self.bridge.publish(self.version)

    def publish_if_allowed(self) -> bool:
        """Take an optimizer step, and publish it if the budget has room."""
        self.since_publish += 1
        allowed = self.bridge.should_publish(self.since_publish)
        if allowed:
            self.publish()
        return allowed


@dataclass(slots=True)
class Seen:
    """The figures of the windows with publishes, as ratios to those without."""

    ratios: list[float] = field(default_factory=list)
    """Ratios of tokens per second."""
    computing_ratios: list[float] = field(default_factory=list)
    """Ratios of tokens per CPU second of the server."""
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    asked: int = 0
    made: int = 0
    seconds: float = 0.0
    silence_seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LEAST_RATIO), help="tokens of an output")
    parser.add_argument("--in-flight", default="auto", help="what becomes of running requests, as for the trainer")
    parser.add_argument("--sync-budget", type=float, default=0.2, help="share of recomputed tokens, as for the trainer")
    asked = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    model = base_model()
    flags = ("--share-weights", "--max-num-seqs", str(REQUESTS))
    with tempfile.TemporaryDirectory() as directory, server(model, directory, *flags) as running:
        flags = {"forward_weights": "masters", "in_flight": asked.in_flight, "sync_budget": asked.sync_budget}
        bridge = SharedVllmBridge(trainer(running.url, model, directory, mode="shared_vllm", **flags))
        publisher = Publisher(bridge, bridge.prepare())
        try:
            publisher.publish()
            idle(publisher, running)
            for length in asked.lengths:
                tell(length, measure(publisher, running, length, pairs=asked.pairs, seconds=asked.seconds))
        finally:
            bridge.close()


def idle(publisher: Publisher, running: Server, *, times: int = 40) -> None:
    """Measure publishes without load, in wall time and in both sides' CPU time."""
    own = psutil.Process()
    took, spent = [], []
    for _ in range(times):
        cpu, began = running.cpu_seconds() + sum(own.cpu_times()[:2]), time.monotonic()
        publisher.publish()
        took.append(time.monotonic() - began)
        spent.append(running.cpu_seconds() + sum(own.cpu_times()[:2]) - cpu)
    median, computed = statistics.median(took), statistics.mean(spent)
    print(
        f"idle: publish {median * 1e3:.0f} ms (fastest {min(took) * 1e3:.0f}), {computed * 1e3:.0f} ms computing; "
        f"must be under {IDLE_SECONDS * 1e3:.0f} ms: {verdict(median < IDLE_SECONDS)} by the clock, "
        f"{verdict(computed < IDLE_SECONDS)} by CPU time",
        flush=True,
    )


def measure(publisher: Publisher, running: Server, length: int, *, pairs: int, seconds: float) -> Seen:
    seen = Seen()
    with in_flight(running.url, requests=REQUESTS, tokens=length) as requests:
        window(running, requests, seconds / 2, None, Seen())  # the first seconds are slow
        for number in range(pairs):
            order = (False, True) if number % 2 == 0 else (True, False)
            rates = {
                publishing: window(running, requests, seconds, publisher if publishing else None, seen)
                for publishing in order
            }
            seen.ratios.append(rates[True][0] / rates[False][0])
            seen.computing_ratios.append(rates[True][1] / rates[False][1])
            for publishing, (rate, _) in rates.items():
                seen.rates[publishing].append(rate)
    return seen


def window(
    running: Server, requests: InFlight, seconds: float, publisher: Publisher | None, seen: Seen
) -> tuple[float, float]:
    """Return tokens per second and per CPU second of the server over some time, with or without publishes."""
    requests.silence_seconds()
    cpu = running.cpu_seconds()
    tokens, began = running.debug()["generated_tokens_total"], time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if publisher is not None:
            seen.asked += 1
            seen.made += publisher.publish_if_allowed()
        time.sleep(max(0.0, min(now + INTERVAL_SECONDS, began + seconds) - time.monotonic()))
    generated = running.debug()["generated_tokens_total"] - tokens
    took, cpu = time.monotonic() - began, running.cpu_seconds() - cpu
    silence = requests.silence_seconds()
    if publisher is not None:
        seen.seconds += took
        seen.silence_seconds = max(seen.silence_seconds, silence)
    return generated / took, generated / cpu


def tell(length: int, seen: Seen) -> None:
    ratio, computing = statistics.median(seen.ratios), statistics.median(seen.computing_ratios)
    least = LEAST_RATIO.get(length)
    must = "" if least is None else f" (must be at least {least}: {verdict(ratio >= least)})"
    print(
        f"{REQUESTS} requests of {length} tokens: {middle(seen.rates[True])} tokens/s with publishes, "
        f"{middle(seen.rates[False])} without, ratio {ratio:.2f}{must}, {computing:.2f} per CPU second; "
        f"{seen.made / seen.seconds:.2f} publishes per second of {seen.asked / seen.seconds:.2f} asked for; "
        f"longest silence {seen.silence_seconds:.2f} s (must be under {SILENCE_SECONDS:.0f} s: "
        f"{verdict(seen.silence_seconds < SILENCE_SECONDS)})",
        flush=True,
    )


def middle(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):,.0f}"


def verdict(holds: bool) -> str:
    return "met" if holds else "NOT MET"


if __name__ == "__main__":
    main()
