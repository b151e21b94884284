"""The verb `validate`: rewards are checked on gold answers without a model, and a wrong one ends with code 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from environments.arithmetic_server import ArithmeticEnv
from environments.rewards import GoldItem
from environments.sdk.errors import GoldMissing
from environments.sdk.runtime.cli import run_verb

ROOT = Path(__file__).parents[4]


def test_an_environment_whose_rewards_are_right_passes_every_item_and_needs_no_model():
    command = [sys.executable, "environments/arithmetic_server.py", "validate", "--env.eval_problems", "3"]
    command += ["--env.tokenizer_name", "/no/such/model", "--openai.base_url", "http://127.0.0.1:9/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["pass"] * 3 + ["3"]
    assert lines[-1] == "3 of 3 items passed"


class Careless(ArithmeticEnv):
    """A faulty reward: it takes the answer from anywhere in the text, and misses negative ones."""

    async def score_answer(self, item, text):
        return float(item.removeprefix("-") in text)

    def gold_items(self):
        yield GoldItem("7", "#### 7", ("#### 8", "#### 17"), name="seven")
        yield GoldItem("8", "#### 8", ("#### 7",), name="eight")
        yield GoldItem("9", "#### none", name="nine")


def test_items_that_fail_are_named_with_what_was_wrong_and_the_exit_code_is_1(capsys):
    assert run_verb(Careless, ["validate"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  seven: the wrong answer '#### 17' earns 1 like a right one",
        "pass  eight",
        "FAIL  nine: the right answer '#### none' earns 0, not 1",
        "1 of 3 items passed",
        "failed: seven, nine",
    ]


def test_a_wrong_answer_may_be_a_text_alone(capsys):
    """Its letters were tried, and the answer itself was not."""

    class Alone(Careless):
        def gold_items(self):
            yield GoldItem("7", "#### 7", "#### 17", name="seven")

    assert run_verb(Alone, ["validate"]) == 1
    assert "FAIL  seven: the wrong answer '#### 17' earns 1 like a right one" in capsys.readouterr().out


def test_a_score_that_raises_fails_its_item_and_the_others_are_still_checked(capsys):
    class Raising(Careless):
        async def score_answer(self, item, text):
            return 1.0 if int(text.removeprefix("#### ") or 0) == int(item) else 0.0

    assert run_verb(Raising, ["validate"]) == 1
    report = capsys.readouterr().out
    assert "FAIL  nine: the right answer '#### none' raised ValueError" in report
    assert "pass  seven" in report


def test_the_best_score_is_the_environments_own(capsys):
    class Generous(Careless):
        best_score = 2.0

    assert run_verb(Generous, ["validate"]) == 1
    assert "the right answer '#### 8' earns 1, not 2" in capsys.readouterr().out


def test_an_environment_without_gold_answers_is_told_what_to_add():
    class Bare(ArithmeticEnv):
        gold_items = ArithmeticEnv.__mro__[1].gold_items

    with pytest.raises(GoldMissing, match="Bare has no gold_items; validate needs gold_items and score_answer"):
        run_verb(Bare, ["validate"])


def test_checking_nothing_is_not_a_success():
    class Empty(ArithmeticEnv):
        def gold_items(self):
            return []

    with pytest.raises(GoldMissing, match="nothing was checked"):
        run_verb(Empty, ["validate"])
