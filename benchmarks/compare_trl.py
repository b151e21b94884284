"""Compares the demo with TRL's GRPOTrainer: same model, problems, batch, group and learning rate, two threads, one run.

Prints for both the generated tokens per second and the time to a mean reward of 0.9 over three steps, from process
start and from the first rollout, and their ratios. TRL is installed from the package index into an environment of its
own under the cache directory. Run `make bench` on an otherwise idle machine; only the ratios carry over to another one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PEER_PACKAGES = ["trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "peft==0.21.2"]
TORCH = "torch==2.13.0"
REWARD = 0.9
WINDOW_STEPS = 3
SEQUENCES_PER_STEP = 128
DEMO = ROOT / "configs" / "demo.yaml"
OPTIMIZER_FLAGS = {
    "--learning-rate": "lr",
    "--lr-schedule": "lr_schedule",
    "--adam-beta2": "adam_beta2",
    "--adam-epsilon": "adam_eps",
}
"""The demo's own optimizer settings, which TRL takes too."""


@dataclass(frozen=True)
class Side:
    """One system's run: its start, the start of its first rollout, and (time, reward, tokens) of each step."""

    name: str
    started_at: float
    first_rollout_at: float
    steps: list[tuple[float, float, float]]

    def reached_at(self) -> float | None:
        """Return the time at which the mean reward of three steps in a row first reached 0.9; None if it never did."""
        for end in range(WINDOW_STEPS, len(self.steps) + 1):
            if statistics.mean(step[1] for step in self.steps[end - WINDOW_STEPS : end]) >= REWARD:
                return self.steps[end - 1][0]
        return None

    def tokens_per_second(self) -> float:
        return sum(step[2] for step in self.steps) / (self.steps[-1][0] - self.first_rollout_at)

    def seconds(self, since: float) -> float:
        reached = self.reached_at()
        return float("inf") if reached is None else reached - since


def base_model(task: str) -> Path:
    """Return the demo's base, created if this machine has none yet."""
    command = [sys.executable, "-m", "example_trainer.tiny", "--task", task]
    printed = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    return Path(next(line.removeprefix("path ") for line in printed.splitlines() if line.startswith("path ")))


def peer_python(cache: Path) -> Path:
    """Return the interpreter of an environment that holds TRL, created on the first call."""
    environment = cache / "bench-trl-1.16.0"
    python = environment / "bin" / "python"
    if not (environment / ".complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
        (environment / ".complete").touch()
    return python


def run_peer(python: Path, model: Path, seed: int, steps: int) -> Side:
    demo = yaml.safe_load(DEMO.read_text())
    started_at = time.time()
    environ = os.environ | {
        "PEER_STARTED_AT": str(started_at),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    command = [python, str(ROOT / "benchmarks" / "trl_peer.py"), "--model", str(model)]
    command += ["--seed", str(seed), "--steps", str(steps)]
    for flag, key in OPTIMIZER_FLAGS.items():
        command += [flag, str(demo["trainer"][key])]
    output = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[len("RESULT ") :])
    rows = [(s["at"], s["reward"], s["mean_length"] * result["sequences_per_step"]) for s in result["steps"]]
    return Side("TRL 1.16 (HF generate)", started_at, result["first_rollout_at"], rows)


def run_ours(model: Path, seed: int, steps: int) -> Side:
    with tempfile.TemporaryDirectory() as run_dir:
        started_at = time.time()
        flags = f"--model-name {model} --seed {seed} --training-steps {steps} --run-dir {run_dir}".split()
        no_evaluation = ["--env.eval_at_start", "false", "--env.eval_at_end", "false"]  # TRL makes none either
        demo = ["-m", "example_trainer.run", "--config", str(DEMO)]
        command = [sys.executable, *demo, *flags, *no_evaluation]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "reward/mean" in line]
    # Step 1 begins when the first policy is published and its batch is asked for; rollouts begin then as well.
    first_rollout_at = rows[0]["timestamp"] - rows[0]["time/step"]
    taken = [(r["timestamp"], r["reward/mean"], r["response/length_mean"] * SEQUENCES_PER_STEP) for r in rows]
    return Side("this project (vLLM, shared weights)", started_at, first_rollout_at, taken)


def print_table(ours: list[Side], peers: list[Side]) -> None:
    """Print medians over the seeds; the last column is ours relative to the peer, above 1 is better."""
    measures = [
        ("generated tokens/s", Side.tokens_per_second, False),
        ("reward 0.9 from process start, s", lambda side: side.seconds(side.started_at), True),
        ("reward 0.9 from first rollout, s", lambda side: side.seconds(side.first_rollout_at), True),
    ]
    print(f"{'':36}{ours[0].name:>38}{peers[0].name:>26}{'ours is better by':>20}")
    for title, measure, lower_is_better in measures:
        mine, theirs = (statistics.median(measure(side) for side in sides) for sides in (ours, peers))
        ratio = theirs / mine if lower_is_better else mine / theirs
        print(f"{title:36}{mine:38,.1f}{theirs:26,.1f}{ratio:19.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "atropos")
    arguments = parser.parse_args()
    model, python = base_model("chain"), peer_python(arguments.cache)
    ours, peers = [], []
    for seed in arguments.seeds:
        # In turn, so that a machine whose speed drifts does not favour one side.
        peers.append(run_peer(python, model, seed, arguments.steps))
        ours.append(run_ours(model, seed, arguments.steps))
    print_table(ours, peers)


if __name__ == "__main__":
    main()
