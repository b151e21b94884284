"""The warm-up: first the skill (right worked solutions), then the habits (what the noisy teacher writes).

Muon steps the weight matrices; at this size it learns in a third of the steps that AdamW alone would need.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from environments.tasks.arithmetic import Problem, TaskName, problem_stream
from example_trainer.tiny.muon import Muon
from example_trainer.tiny.teacher import noisy_solution
from example_trainer.tiny.tokenizer import END, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SKILL_STEPS, HABIT_STEPS, SEQUENCES_PER_STEP = 220, 60, 64
MATRIX_RATE, OTHER_RATE = 1e-2, 4e-3
WARMUP_STEPS, FINAL_RATE_FRACTION = 20, 0.05
IGNORED = -100

Writer = Callable[[Problem, random.Random], str]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the warm-up: how many steps, and what is written under each problem."""

    steps: int
    write: Writer


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, task: TaskName, seed: int) -> None:
    """Train `model` in place; the same result for the same seed and thread count."""
    rng = random.Random(f"warm-up/{task}/{seed}")
    problems = problem_stream(task, seed=f"warm-up/{seed}")
    phases = (Phase(SKILL_STEPS, lambda problem, _: problem.worked), Phase(HABIT_STEPS, noisy_solution))
    model.train()
    optimizers = make_optimizers(model)
    steps = [phase for phase in phases for _ in range(phase.steps)]
    for number, phase in enumerate(steps):
        batch = make_batch(tokenizer, problems, phase.write, rng)
        take_step(model, optimizers, batch, rate_fraction(number, len(steps)))
    model.eval()


def make_optimizers(model: Qwen2ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return (
        Muon(matrices, lr=MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    )


def rate_fraction(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to a twentieth of the rate."""
    decay = 1.0 - (1.0 - FINAL_RATE_FRACTION) * step / steps
    return min((step + 1) / WARMUP_STEPS, decay)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], write: Writer, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, padded on the right; only the completions are labelled."""
    pairs = [(problem, write(problem, rng)) for problem, _ in zip(problems, range(SEQUENCES_PER_STEP), strict=False)]
    prompts = tokenizer([render_prompt(problem.question) for problem, _ in pairs])["input_ids"]
    completions = tokenizer([text + END for _, text in pairs])["input_ids"]
    length = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = torch.full((len(pairs), length), int(tokenizer.pad_token_id))
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return ids, labels


def take_step(
    model: Qwen2ForCausalLM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float,
) -> None:
    ids, labels = batch
    logits = model(input_ids=ids, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * (MATRIX_RATE if isinstance(optimizer, Muon) else OTHER_RATE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
