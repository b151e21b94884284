"""The warm-up: first the skill (right worked solutions), then the habits (what the noisy teacher writes).

Muon steps the weight matrices; at this size it learns in a third of the steps that AdamW alone would need.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from environments.tasks.arithmetic import Problem, TaskName, problem_stream
from example_trainer.tiny.muon import Muon
from example_trainer.tiny.teacher import noisy_solution
from example_trainer.tiny.tokenizer import ASSISTANT, END, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SEQUENCES_PER_STEP = 64
SKILL_STEPS = 300
HABIT_STEPS = 150  # after 60, updates without a signal undid the habit within 40 steps: the control run "learnt"
MATRIX_RATE, OTHER_RATE = 1e-2, 6e-3
WARMUP_STEPS, FINAL_RATE_FRACTION = 20, 0.05
IGNORED = -100
GOLDEN_RATIO = 0.6180339887498949

Writer = Callable[[Problem, float, random.Random], str]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the warm-up: its number of steps, and the answers that are learned."""

    steps: int
    write: Writer


class Moods:
    """The teacher's moods, evenly spread over the problems that begin with each digit.

    Working a problem out begins with its first digit. Drawn at random, the moods would leave the model with a digit or
    two for which it works things out and others for which it guesses; the golden ratio's multiples leave no such gap.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._by_digit: dict[str, float] = {}

    def next_for(self, problem: Problem) -> float:
        digit = str(problem.steps[0].left)[0]
        mood = self._by_digit.get(digit, self._rng.random())
        self._by_digit[digit] = (mood + GOLDEN_RATIO) % 1.0
        return mood


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, task: TaskName, seed: int) -> None:
    """Train `model` in place; the same result for the same seed and thread count."""
    rng = random.Random(f"warm-up/{task}/{seed}")
    moods = Moods(rng)
    problems = problem_stream(task, seed=f"warm-up/{seed}")
    phases = (Phase(SKILL_STEPS, lambda problem, *_: problem.worked), Phase(HABIT_STEPS, noisy_solution))
    model.train()
    optimizers = make_optimizers(model)
    steps = [phase for phase in phases for _ in range(phase.steps)]
    for number, phase in enumerate(steps):
        batch = make_batch(tokenizer, problems, phase.write, moods, rng)
        take_step(model, optimizers, batch, rate_fraction(number, len(steps)))
    model.eval()


def make_optimizers(model: Qwen2ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices between layers, AdamW for the two with a row for each token, norms and biases."""
    by_token = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in by_token]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in by_token]
    return (
        Muon(matrices, lr=MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    )


def rate_fraction(step: int, steps: int) -> float:
    """Return the fraction of the rate: it rises linearly, then falls linearly to a twentieth."""
    decay = 1.0 - (1.0 - FINAL_RATE_FRACTION) * step / steps
    return min((step + 1) / WARMUP_STEPS, decay)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], write: Writer, moods: Moods, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, padded on the right; only the completions are labelled."""
    chosen = list(islice(problems, SEQUENCES_PER_STEP))
    texts = [render_prompt(p.question) + write(p, moods.next_for(p), rng) + END for p in chosen]
    rows = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]
    assistant = tokenizer.convert_tokens_to_ids(ASSISTANT)
    length = max(map(len, rows))
    padding = int(tokenizer.pad_token_id)
    ids = torch.tensor([row + [padding] * (length - len(row)) for row in rows])
    labels = [_completion_labels(row, row.index(assistant) + 1, length) for row in rows]
    return ids, torch.tensor(labels)


def _completion_labels(row: list[int], start: int, length: int) -> list[int]:
    return [IGNORED] * start + row[start:] + [IGNORED] * (length - len(row))


def take_step(
    model: Qwen2ForCausalLM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float,
) -> None:
    ids, labels = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    labelled = targets != IGNORED  # the prompts need no logits
    loss = functional.cross_entropy(model.lm_head(hidden[labelled]), targets[labelled])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * (MATRIX_RATE if isinstance(optimizer, Muon) else OTHER_RATE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
