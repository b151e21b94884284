"""TRL's GRPOTrainer on the demo's task, with the demo's model, problems, batch, group and learning rate.

Run by `compare_trl.py` inside an environment that holds the public `trl` package; it imports this project's task texts
only. Prints one JSON object: per step the wall-clock time, the mean reward and the generated tokens so far.
"""

from __future__ import annotations

import argparse
import json
import os
import time

STARTED_AT = float(os.environ.get("PEER_STARTED_AT", time.time()))

import torch  # noqa: E402 # the clock starts before the imports, as it does for the other side
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from environments.tasks.arithmetic import grade, problem_stream  # noqa: E402


class StepLog(TrainerCallback):
    """Collects wall-clock time, reward and tokens of every step from TRL's own log."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: ANN001, ANN003, ANN201, ARG002 # TRL's signature
        if logs and "reward" in logs:
            length = logs["completions/mean_length"]
            self.steps.append({"at": time.time(), "reward": logs["reward"], "mean_length": length})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--lr-schedule", required=True)
    parser.add_argument("--adam-beta2", type=float, required=True)
    parser.add_argument("--adam-epsilon", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-completion-length", type=int, default=34)
    return parser.parse_args()


def make_dataset(task: str, seed: int, prompts: int) -> Dataset:
    stream = problem_stream(task, seed=seed)  # type: ignore[arg-type] # argparse gives plain text
    problems = [next(stream) for _ in range(prompts)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.question}], "answer": p.answer} for p in problems]
    )


def reward(completions, answer, **_):  # noqa: ANN001, ANN003, ANN201 # TRL calls it with its own columns
    return [grade(completion[0]["content"], gold) for completion, gold in zip(completions, answer, strict=True)]


def train(arguments: argparse.Namespace, output_dir: str) -> dict[str, object]:
    torch.set_num_threads(arguments.threads)
    log = StepLog()
    config = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=128,
        num_generations=8,
        gradient_accumulation_steps=1,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=arguments.lr_schedule,
        adam_beta2=arguments.adam_beta2,
        adam_epsilon=arguments.adam_epsilon,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        temperature=1.0,
        max_completion_length=arguments.max_completion_length,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        seed=arguments.seed,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=reward,
        args=config,
        train_dataset=make_dataset(arguments.task, arguments.seed, 16 * arguments.steps),
        callbacks=[log],
    )
    first_rollout_at = time.time()
    trainer.train()
    return {
        "started_at": STARTED_AT,
        "first_rollout_at": first_rollout_at,
        "sequences_per_step": 128,
        "steps": log.steps,
    }


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        result = train(parse_arguments(), scratch)
    print("RESULT " + json.dumps(result))
