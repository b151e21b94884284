"""Measures what training and publishes cost the demo's generation: tokens per second with both, and without either.

    python -m benchmarks.demo_generation [--pairs 6] [--seconds 3]

The demo runs as its file says, but its queue is long, so that its environment never waits for the trainer and the
trainer never for the environment. In turn, the tokens of its server are counted while the trainer works and while it is
stopped by a signal between two publishes. Printed are the rates of each pair of windows, the steps that were trained in
it, and the median of the ratios, of which 0.85 is asked. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from example_trainer.processes.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEP = 25
"""The answers have their final length from about here on."""
MOST_STEPS = 1000
LIMIT_SECONDS = 120.0
PROMISED = 0.85
FLAGS = (
    *("--training-steps", str(MOST_STEPS), "--env.max_batches_offpolicy", "1000", "--progress", "plain"),
    *("--env.eval_at_start", "false", "--env.eval_at_end", "false"),
)


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo, watched from outside."""

    launcher: subprocess.Popen[bytes]
    broker: str
    server: str

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.broker}/v1/status", timeout=30).json()
        return answer

    def steps(self) -> int:
        return int((self.status()["run"] or {}).get("current_step", 0))

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples at the inference server."""
        text = httpx.get(f"{self.server}/metrics", timeout=30, follow_redirects=True).text
        return sum(map(float, re.findall(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$", text)))

    def trainer(self) -> psutil.Process:
        children = psutil.Process(self.launcher.pid).children()
        return next(child for child in children if "example_trainer.grpo" in child.cmdline())

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until something holds, which cannot be asked for while the programs start."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the demo has ended, or waited {LIMIT_SECONDS:.0f} s for {what}")
            try:
                if reached():
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.02)

    def rate(self, seconds: float) -> float:
        """Return the tokens per second that the server samples from now on."""
        before, began = self.metric("vllm:generation_tokens_total"), time.monotonic()
        time.sleep(seconds)
        after, ended = self.metric("vllm:generation_tokens_total"), time.monotonic()
        return (after - before) / (ended - began)


@contextmanager
def running_demo() -> Iterator[Demo]:
    broker, server = free_ports(2)
    with tempfile.TemporaryDirectory() as run_dir:
        ports = ("--api.port", str(broker), "--vllm-port", str(server), "--run-dir", run_dir)
        demo = ("-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml"))
        launcher = subprocess.Popen([sys.executable, *demo, *ports, *FLAGS], cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            yield Demo(launcher, f"http://127.0.0.1:{broker}", f"http://127.0.0.1:{server}")
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)


@contextmanager
def stopped_trainer(demo: Demo) -> Iterator[None]:
    """Stop the trainer while it publishes nothing: during a publish the server would wait for it."""
    trainer = demo.trainer()
    while True:
        demo.wait(lambda: not demo.metric("atropos_server_paused"), "a publish to end")
        trainer.suspend()
        if not demo.metric("atropos_server_paused"):
            break
        trainer.resume()
    try:
        yield
    finally:
        trainer.resume()


def measure(demo: Demo, seconds: float) -> tuple[float, float, int]:
    """Return the rates of one pair of windows, with the trainer and without it, and the steps of the first one."""
    before = demo.steps()
    working = demo.rate(seconds)
    steps = demo.steps() - before
    if not steps:
        raise SystemExit(f"the trainer made no step in {seconds:g} s; ask for more --seconds")
    with stopped_trainer(demo):
        alone = demo.rate(seconds)
        flow = demo.status()["flow"]
    if flow["outstanding"] >= flow["limit"]:
        raise SystemExit("the queue was full, so that the environment waited; ask for fewer --pairs")
    return working, alone, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    with running_demo() as demo:
        demo.wait(lambda: demo.steps() >= FIRST_STEP, f"step {FIRST_STEP}")
        ratios = []
        for number in range(1, asked.pairs + 1):
            working, alone, steps = measure(demo, asked.seconds)
            ratios.append(working / alone)
            print(
                f"pair {number}: {working:8,.0f} tokens/s with {steps} steps, {alone:8,.0f} without: {ratios[-1]:.2f}"
            )
    median = statistics.median(ratios)
    print(f"median {median:.2f} ({'met' if median >= PROMISED else 'missed'}: {PROMISED} is asked)")


if __name__ == "__main__":
    main()
