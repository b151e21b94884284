"""Two arithmetic word-problem tasks that a tiny model can learn: their problems, worked solutions and grading.

`chain` tells of three events ("Ann has 35 pens. gets 7. loses 4. gets 9. How many now?") and is only solved reliably by
writing the steps down. `add` is one two-digit sum or difference, worked as tens and then ones. Both end in `#### n`.

The arithmetic environment trains on these problems and the tiny base model is warmed up on them. A problem belongs to
the training or the held-out split by a hash of its numbers, so no evaluation problem is ever seen in either place.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5
from itertools import islice
from typing import Literal

LONGEST_NUMBER = 100
"""Characters of a number that is read as an answer: Python refuses to convert thousands of digits."""

TaskName = Literal["chain", "add"]
Split = Literal["train", "eval"]
Operator = Literal["+", "-"]

TASK_NAMES: tuple[TaskName, ...] = ("chain", "add")
NAMES = ("Ann", "Bob", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("pens", "cups", "books", "coins", "eggs", "cards", "nuts", "keys")
HELD_OUT_ONE_IN = 10
LARGEST_TOTAL = 99

_ANSWER = re.compile(r"#### (-?\d[\d,./]*)")
_WHOLE = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+))(?:\.0+)?[,./]*")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of working: `left operator right = result`."""

    left: int
    operator: Operator
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right

    def line(self, result: int | None = None) -> str:
        """Return the line as text; `result` replaces the right result (to write down a wrong step)."""
        return f"{self.left}{self.operator}{self.right}={self.result if result is None else result}\n"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with the steps that answer it."""

    task: TaskName
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def worked(self) -> str:
        """Return the right solution with every step written down."""
        return "".join(step.line() for step in self.steps) + final_line(self.answer)

    @property
    def held_out(self) -> bool:
        """True if the problem is kept for evaluation: one in ten, decided by its numbers alone."""
        numbers = ",".join([self.task, str(self.steps[0].left), *(f"{s.operator}{s.right}" for s in self.steps)])
        return int(md5(numbers.encode(), usedforsecurity=False).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def final_line(answer: int) -> str:
    return f"#### {answer}"


def extract_answer(text: str) -> int | None:
    """Return the number after the last `####`; None if there is none, or one that is not whole or far too long."""
    found = _ANSWER.findall(text)
    return whole_number(found[-1]) if found else None


def whole_number(text: str) -> int | None:
    """Return the number that a text consists of: GSM8K writes `1,080` for 1080; None if it is not a whole number."""
    found = _WHOLE.fullmatch(text.strip())
    return int(found[1].replace(",", "")) if found and len(found[1]) <= LONGEST_NUMBER else None


def grade(text: str, answer: int) -> float:
    """Return 1.0 if the last `#### n` in `text` is the right answer, else 0.0."""
    return 1.0 if extract_answer(text) == answer else 0.0


def make_chain_problem(rng: random.Random) -> Problem:
    """Return a problem of three one-digit gains and losses; every running total stays between 0 and 99."""
    start = rng.randint(10, 90)
    steps: list[Step] = []
    total = start
    for _ in range(3):
        amount = rng.randint(1, 9)
        gains = rng.random() < 0.5
        if not 0 <= (total + amount if gains else total - amount) <= LARGEST_TOTAL:
            gains = not gains
        step = Step(total, "+" if gains else "-", amount)
        steps.append(step)
        total = step.result
    events = "".join(f" {'gets' if s.operator == '+' else 'loses'} {s.right}." for s in steps)
    question = f"{rng.choice(NAMES)} has {start} {rng.choice(THINGS)}.{events} How many now?"
    return Problem("chain", question, tuple(steps))


def make_add_problem(rng: random.Random) -> Problem:
    """Return one two-digit sum or difference; the other operation would stay between 0 and 99 as well."""
    start = rng.randint(22, 86)
    largest = min(start, LARGEST_TOTAL - start)
    amount = rng.choice([n for n in range(11, largest + 1) if n % 10])
    gains = rng.random() < 0.5
    name, other = rng.sample(NAMES, 2)
    event = f"{other} gives {name} {amount} more." if gains else f"{name} gives {other} {amount} away."
    question = f"{name} has {start} {rng.choice(THINGS)}. {event} How many now?"
    return Problem("add", question, split_by_place(start, "+" if gains else "-", amount))


def split_by_place(start: int, operator: Operator, amount: int) -> tuple[Step, Step]:
    """Return a two-digit operation as its tens and then its ones."""
    tens = Step(start, operator, amount - amount % 10)
    return tens, Step(tens.result, operator, amount % 10)


def make_problem(task: TaskName, rng: random.Random) -> Problem:
    return make_chain_problem(rng) if task == "chain" else make_add_problem(rng)


def problem_stream(task: TaskName, *, seed: int | str, split: Split = "train") -> Iterator[Problem]:
    """Yield problems of one split without end; the same arguments give the same problems on every machine."""
    rng = random.Random(f"{task}/{split}/{seed}")
    while True:
        problem = make_problem(task, rng)
        if problem.held_out == (split == "eval"):
            yield problem


def held_out_problems(task: TaskName, count: int = 200) -> list[Problem]:
    """Return the evaluation set: the first `count` distinct held-out problems of a fixed stream."""
    distinct: dict[tuple[Step, ...], Problem] = {}
    stream = problem_stream(task, seed="held-out", split="eval")
    while len(distinct) < count:
        for problem in islice(stream, count):
            distinct.setdefault(problem.steps, problem)
    return list(distinct.values())[:count]
