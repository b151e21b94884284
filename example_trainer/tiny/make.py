"""The program makes one base model: tokenizer, fresh weights, warm-up, measurement, and the model's folder."""

from __future__ import annotations

import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from environments.tasks.arithmetic import TASK_NAMES, TaskName, grade, held_out_problems
from example_trainer.tiny.cache import THREADS, WEIGHTS_FILE, BaseReport, recipe_key, write_report
from example_trainer.tiny.model import CONTEXT_LENGTH, generate_texts, make_model
from example_trainer.tiny.tokenizer import make_tokenizer, render_prompt
from example_trainer.tiny.warmup import warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

MEASURED_PROBLEMS, SAMPLES_PER_PROBLEM = 200, 4


def make_base(task: TaskName, seed: int, directory: Path) -> BaseReport:
    """Make the model in `directory` and return how well it solves held-out problems."""
    started = time.monotonic()
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    tokenizer = make_tokenizer(context_length=CONTEXT_LENGTH)
    model = make_model(tokenizer)
    warm_up(model, tokenizer, task=task, seed=seed)
    greedy, _ = measure(model, tokenizer, task, temperature=0.0)
    pass_rate, length = measure(model, tokenizer, task, temperature=1.0, samples=SAMPLES_PER_PROBLEM)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return BaseReport(
        task=task,
        seed=seed,
        weights_sha256=sha256((directory / WEIGHTS_FILE).read_bytes()).hexdigest(),
        pass_rate=round(pass_rate, 4),
        greedy_accuracy=round(greedy, 4),
        mean_length_tokens=round(length, 1),
        seconds=round(time.monotonic() - started, 1),
        recipe=recipe_key(),
    )


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TaskName,
    *,
    temperature: float,
    samples: int = 1,
) -> tuple[float, float]:
    """Return the share of right answers on held-out problems, and completions' mean length with the end token."""
    problems = held_out_problems(task, MEASURED_PROBLEMS) * samples
    prompts = [render_prompt(problem.question) for problem in problems]
    texts = generate_texts(model, tokenizer, prompts, temperature=temperature)
    right = sum(grade(text, problem.answer) for text, problem in zip(texts, problems, strict=True))
    length = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    return right / len(problems), length / len(problems)


def main(argv: list[str]) -> int:
    """Make a model by `TASK SEED DIRECTORY`; `cache` runs this in a process of its own."""
    task, seed, directory = argv
    if task not in TASK_NAMES:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASK_NAMES)}")
    write_report(Path(directory), make_base(task, int(seed), Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
