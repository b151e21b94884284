"""Compares a training step of this project with TRL's and the published Atropos trainer's, on the same batch.

Every side gets the same model, the same 64 sequences and the same loss (the clipped ratio, a mean per sequence), one
thread, and is timed over layout, forward, loss, backward, clipping and optimizer step. The sides take turns, each in a
process of its own. Printed are medians of tokens trained per processor second, where every completion counts, and each
group's prompt once; loss and gradient norm are printed too; they show that all sides did the same work. The peers are
installed from the package index into environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compare_trl import peer_python
from benchmarks.learner_peers import LEARNING_RATE, Step, serve

ROOT = Path(__file__).resolve().parents[1]
GROUPS, GROUP_SIZE = 8, 8
SHORTEST, LONGEST, MEDIAN = 32, 512, 150
SPREAD = 0.7
"""Standard deviation of the logarithm of a sequence's length."""
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 128
MICRO_BATCH = 8
LEAST = {"TRL 1.16": 2.0, "Atropos 0.4": 2.0}
"""Required speed-up of the packed step over these."""
SIDES = {
    "ours, packed": "shared",
    "ours, padded": "rows",
    "TRL 1.16": "trl",
    "Atropos 0.4": "atropos",
}


def make_model(directory: Path, arguments: argparse.Namespace) -> None:
    """Write a Qwen2 with random weights, and a tokenizer, which TRL requires."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from example_trainer.tiny.tokenizer import make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 128),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    make_tokenizer(context_length=1024).save_pretrained(directory)


def make_batch(vocabulary: int) -> dict[str, Any]:
    """Return a batch in the Atropos form, whose logprobs `add_logprobs` fills in."""
    generator = np.random.default_rng(0)
    groups = []
    for _ in range(GROUPS):
        lengths = np.exp(generator.normal(np.log(MEDIAN), SPREAD, GROUP_SIZE)).clip(SHORTEST, LONGEST).astype(int)
        prompt_length = min(int(generator.integers(SHORTEST_PROMPT, LONGEST_PROMPT)), int(lengths.min()) - 8)
        prompt = generator.integers(0, vocabulary, prompt_length)
        tokens = [np.concatenate([prompt, generator.integers(0, vocabulary, n - len(prompt))]) for n in lengths]
        group = {
            "tokens": [row.tolist() for row in tokens],
            "masks": [[-100] * len(prompt) + row[len(prompt) :].tolist() for row in tokens],
            "scores": generator.normal(size=GROUP_SIZE).tolist(),
            "overrides": None,
            "generation_params": None,
            "group_overrides": None,
        }
        groups.append(group)
    return {"batch": groups}


def add_logprobs(batch: dict[str, Any], model: Path) -> None:
    """Add the model's own logprobs, so that every ratio is 1 and all trainers' clips agree."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for group in batch["batch"]:
        group["inference_logprobs"] = []
        for row, mask in zip(group["tokens"], group["masks"], strict=True):
            ids = torch.tensor(row)[None]
            with torch.no_grad():
                logs = module(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
            start = mask.count(-100)
            group["inference_logprobs"].append([1.0] * start + logs[start - 1 :])


def trained_tokens(batch: dict[str, Any]) -> int:
    """Count the tokens of every completion, and of each group's prompt once."""
    rows = [(mask.count(-100), len(mask)) for group in batch["batch"] for mask in group["masks"]]
    prompts = sum(group["masks"][0].count(-100) for group in batch["batch"])
    return prompts + sum(length - start for start, length in rows)


def our_step(layout: str, model: Path, batch_path: Path) -> Step:
    from atropos_api.wire import Batch, Group
    from example_trainer.config import TrainingConfig
    from example_trainer.data import data_settings, prepare_batch
    from example_trainer.model import load_policy
    from example_trainer.modeling.layout_choice import choose_layout
    from example_trainer.modeling.loading import PolicyOptions
    from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
    from example_trainer.objective.objective import make_objective
    from example_trainer.training import Learner

    groups = [Group(**group) for group in json.loads(batch_path.read_text())["batch"]]
    config = TrainingConfig.model_validate(
        {
            "model_name": str(model),
            "dtype": "float32",
            "device": "cpu",
            "lr": LEARNING_RATE,
            "weight_decay": 0.0,
            "optimizer": "adamw",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "advantage_std": "population",
            "dual_clip": None,
            "token_budget": MICRO_BATCH * LONGEST,
        }
    )
    policy = load_policy(PolicyOptions(model_name=str(model), dtype="float32", device="cpu"))
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    chosen = choose_layout(policy)
    learner = Learner(
        policy,
        optimizer,
        config,
        objective=make_objective(config, policy),
        layout=chosen if layout == "shared" else "rows",
    )
    batch = prepare_batch(Batch(number=1, run_id="bench", groups=groups), data_settings(config))

    def step() -> tuple[float, float]:
        metrics = learner.train(batch).metrics
        return metrics["train/loss"], metrics["train/grad_norm"]

    return step


def atropos_path(cache: Path) -> Path:
    """Return a directory with only the published package, whose modules have the same names as this project's."""
    directory = cache / "bench-atroposlib-0.4.0-modules"
    if not (directory / ".complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
        subprocess.run([*command, "atroposlib==0.4.0", "tenacity"], check=True)
        (directory / ".complete").touch()
    return directory


class Side:
    """A process that takes one step per request."""

    def __init__(self, name: str, model: Path, batch: Path, cache: Path) -> None:
        kind = SIDES[name]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        files = ["--model", str(model), "--batch", str(batch)]
        peer = [str(ROOT / "benchmarks" / "learner_peers.py"), kind, *files, "--micro-batch", str(MICRO_BATCH)]
        if kind == "trl":
            environ["PYTHONPATH"] = ""
            command = [str(peer_python(cache)), *peer]
        elif kind == "atropos":
            environ["PYTHONPATH"] = str(atropos_path(cache))
            command = [sys.executable, *peer]
        else:
            command = [sys.executable, "-m", "benchmarks.learner_speed", "--serve", kind, *files]
        self.name = name
        self.costs: list[dict[str, float]] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command, cwd=batch.parent if kind in ("trl", "atropos") else ROOT, env=environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._read("READY")

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.costs.append(json.loads(self._read("STEP ")))

    def median(self) -> float:
        """Return the median processor seconds of a step, without the first one, which warms up."""
        return statistics.median(cost["seconds"] for cost in self.costs[1:])

    def close(self) -> None:
        self._process.communicate()

    def _read(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line[len(start) :]
        self._log.seek(0)
        raise SystemExit(f"{self.name} ended:\n{self._log.read()[-4000:]}")


def print_table(sides: list[Side], tokens: int) -> None:
    ours = sides[0].median()
    rounds = len(sides[0].costs) - 1
    print(f"median of {rounds} steps after one to warm up, tokens trained a processor second on one thread")
    print(f"{'':14}{'tokens/s':>12}{'packed is faster by':>21}{'':16}{'loss':>11}{'gradient norm':>15}")
    for side in sides:
        seconds, last = side.median(), side.costs[-1]
        print(
            f"{side.name:14}{tokens / seconds:12,.0f}{seconds / ours:20.2f}x{verdict(side.name, seconds / ours):16}"
            f"{last['loss']:11.5f}{last['grad_norm']:15.5f}"
        )


def verdict(name: str, ratio: float) -> str:
    """Return whether the packed step reaches its required speed-up over this side, in words; empty without a limit."""
    if name not in LEAST:
        return ""
    return f"  must {LEAST[name]:g}x, {'met' if ratio >= LEAST[name] else 'MISSED'}"


def compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model, path = Path(scratch) / "model", Path(scratch) / "batch.json"
        make_model(model, arguments)
        batch = make_batch(arguments.vocabulary)
        add_logprobs(batch, model)
        path.write_text(json.dumps(batch))
        sides = [Side(name, model, path, arguments.cache) for name in SIDES if name in arguments.sides]
        for _ in range(arguments.rounds + 1):
            for side in sides:
                side.step()
        print_table(sides, trained_tokens(batch))
        for side in sides:
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "atropos")
    parser.add_argument("--serve", choices=["shared", "rows"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve:
        serve(our_step(arguments.serve, arguments.model, arguments.batch))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
