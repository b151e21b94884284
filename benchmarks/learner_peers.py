"""Takes training steps of another trainer, on a batch and a model from disk, inside that trainer's own environment.

`trl` is `GRPOTrainer`'s own loss and forward; `atropos` the published trainer's `pad_data_to_good_offset` and
`run_training_step`. For every line on standard input one step is taken and its cost printed; nothing of this project
is imported, since the published package brings modules of the same names.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Step = Callable[[], tuple[float, float]]
"""A function that takes one step and returns its loss and the gradient norm before clipping."""

LEARNING_RATE = 1e-9  # the weights hardly change, so every round measures the same step


def pad(rows: list[list[float]], value: float, *, left: bool) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + row if left else row + f for f, row in zip(fill, rows, strict=True)])


def trl_inputs(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the batch in TRL's form: prompts padded on the left, completions on the right, each to the longest."""
    prompts, completions, logprobs, advantages = [], [], [], []
    for group in batch["batch"]:
        scores = torch.tensor(group["scores"])
        advantages += ((scores - scores.mean()) / scores.std(correction=0)).tolist()
        for tokens, mask, logs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            start = mask.count(-100)
            prompts.append(tokens[:start])
            completions.append(tokens[start:])
            logprobs.append(logs[start:])
    ones = [[[1] * len(row) for row in rows] for rows in (prompts, completions)]
    return {
        "prompt_ids": pad(prompts, 0, left=True),
        "prompt_mask": pad(ones[0], 0, left=True),
        "completion_ids": pad(completions, 0, left=False),
        "completion_mask": pad(ones[1], 0, left=False),
        "old_per_token_logps": pad(logprobs, 0.0, left=False),
        "advantages": torch.tensor(advantages),
    }


def trl_step(model_path: str, batch: dict[str, Any], micro: int) -> Step:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    inputs = trl_inputs(batch)
    count = len(inputs["advantages"])
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=count // micro,
        num_generations=micro,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        temperature=1.0,
        max_completion_length=inputs["completion_ids"].shape[1],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )
    trainer.current_gradient_accumulation_steps = count // micro
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> tuple[float, float]:
        total = 0.0
        for start in range(0, count, micro):
            loss = trainer.compute_loss(model, {name: value[start : start + micro] for name, value in inputs.items()})
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, float(norm)

    return step


def atropos_step(model_path: str, batch: dict[str, Any], micro: int) -> Step:
    from example_trainer.config import TrainingConfig
    from example_trainer.data import pad_data_to_good_offset
    from example_trainer.training import run_training_step

    tokens, labels, advantages, temperatures, logprobs = pad_data_to_good_offset(copy.deepcopy(batch), micro)
    config = TrainingConfig(
        model_name=model_path,
        device="cpu",
        lr=LEARNING_RATE,
        batch_size=micro,
        gradient_accumulation_steps=len(tokens),
        use_wandb=False,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> tuple[float, float]:
        done = run_training_step(
            model, optimizer, tokens, labels, advantages, temperatures, config, 0, inference_logprob_batches=logprobs
        )
        return float(done["loss"]), float(done["grad_norm"])

    return step


def serve(step: Step) -> None:
    """Take a step for each line of input; print a line of JSON with its processor seconds, loss and gradient norm."""
    print("READY", flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        loss, norm = step()
        cost = {"seconds": time.process_time() - started, "loss": loss, "grad_norm": norm}
        print("STEP " + json.dumps(cost), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["trl", "atropos"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    batch = json.loads(arguments.batch.read_text())
    make = trl_step if arguments.side == "trl" else atropos_step
    serve(make(arguments.model, batch, arguments.micro_batch))


if __name__ == "__main__":
    main()
