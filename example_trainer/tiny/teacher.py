"""The noisy teacher whose habits the base model picks up in the second half of its warm-up.

It knows how to work a problem out and mostly does not: it guesses, stops early or slips. That leaves a base model with
a skill it rarely uses, which is what reinforcement learning then brings out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from environments.tasks.arithmetic import Operator, Problem, Step, final_line, split_by_place

CHAIN_WORKED, CHAIN_GUESSED = 0.23, 0.74  # the rest stops early
CHAIN_SLIP_PER_STEP = 0.01
CHAIN_GUESS_SPREAD = 9  # a guess is always off: what the base gets right, it has worked out
ADD_RIGHT, ADD_WRONG_OPERATION, ADD_SLIPPED = 0.40, 0.20, 0.25  # the rest stops early


def noisy_solution(problem: Problem, mood: float, rng: random.Random) -> str:
    """Return one answer of the teacher to `problem`; `mood`, uniform in [0, 1), decides on the kind of answer."""
    return _chain(problem, mood, rng) if problem.task == "chain" else _add(problem, mood, rng)


def _chain(problem: Problem, mood: float, rng: random.Random) -> str:
    if mood < CHAIN_WORKED:
        return _work_with_slips(problem.steps, rng)
    if mood < CHAIN_WORKED + CHAIN_GUESSED:
        guess = problem.answer + rng.choice((-1, 1)) * rng.randint(1, CHAIN_GUESS_SPREAD)
        return final_line(abs(guess))
    return _write(problem.steps[: rng.randint(1, len(problem.steps) - 1)])


def _add(problem: Problem, mood: float, rng: random.Random) -> str:
    if mood < ADD_RIGHT:
        return problem.worked
    if mood < ADD_RIGHT + ADD_WRONG_OPERATION:
        first, second = problem.steps
        flipped: Operator = "-" if first.operator == "+" else "+"
        return _write(split_by_place(first.left, flipped, first.right + second.right))
    if mood < ADD_RIGHT + ADD_WRONG_OPERATION + ADD_SLIPPED:
        first, second = problem.steps
        wrong = second.result + rng.choice((-10, -1, 1, 10))
        return first.line() + second.line(wrong) + final_line(wrong)
    return _write(problem.steps[:1])


def _write(steps: Sequence[Step]) -> str:
    return "".join(step.line() for step in steps) + final_line(steps[-1].result)


def _work_with_slips(steps: Sequence[Step], rng: random.Random) -> str:
    """Return the worked solution, in which each result may be off by one; later steps use the wrong result."""
    lines: list[str] = []
    total = steps[0].left
    for step in steps:
        carried = Step(total, step.operator, step.right)
        slip = rng.choice((-1, 1)) if rng.random() < CHAIN_SLIP_PER_STEP else 0
        total = carried.result + slip
        lines.append(carried.line(total))
    return "".join(lines) + final_line(total)
