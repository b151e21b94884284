"""The arithmetic tasks: right answers, fair grading, and evaluation problems that training never sees."""

import random
from itertools import islice

import pytest

from environments.tasks.arithmetic import (
    TASK_NAMES,
    extract_answer,
    grade,
    held_out_problems,
    make_problem,
    problem_stream,
)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_worked_solutions_are_right_line_by_line_and_graded_so(task):
    for problem in islice(problem_stream(task, seed=1), 500):
        *lines, last = problem.worked.splitlines()
        assert all(eval(line.replace("=", "==")) for line in lines)
        assert last == f"#### {problem.answer}"
        assert grade(problem.worked, problem.answer) == 1.0
        assert 0 <= problem.answer <= 99


@pytest.mark.parametrize("task", TASK_NAMES)
def test_no_training_problem_is_held_out_and_every_evaluation_problem_is(task):
    training = {problem.steps for problem in islice(problem_stream(task, seed=3), 3000)}
    held_out = held_out_problems(task)
    assert len({problem.steps for problem in held_out}) == 200
    assert training.isdisjoint({problem.steps for problem in held_out})


@pytest.mark.parametrize("task", TASK_NAMES)
def test_one_problem_in_ten_is_held_out(task):
    chance = random.Random(5)
    held_out = sum(make_problem(task, chance).held_out for _ in range(3000))
    assert held_out / 3000 == pytest.approx(0.1, abs=0.015)
    drawn = islice(problem_stream(task, seed=5, split="eval"), 200)
    assert all(problem.held_out for problem in drawn)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_seed_gives_the_same_stream_and_another_seed_another(task):
    def first(seed):
        return [problem.question for problem in islice(problem_stream(task, seed=seed), 20)]

    assert first(7) == first(7)
    assert first(7) != first(8)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 47", 47),
        ("1+1=2\n#### 2\n#### 3", 3),
        ("#### -4", -4),
        ("47", None),
        ("####47", None),
        ("", None),
        ("#### " + "9" * 5000, None),
        ("#### 1,080", 1080),
        ("#### 47.", 47),
        ("#### 47.00", 47),
        ("#### 47.5", None),
        ("#### 47/2", None),
        ("#### 47\n#### 47.5", None),
    ],
)
def test_the_last_marked_number_is_the_answer(text, answer):
    assert extract_answer(text) == answer


def test_a_missing_answer_earns_nothing():
    assert grade("I do not know", 3) == 0.0
