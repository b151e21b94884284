"""The reference page describes every registered reward as the code declares it."""

import math
import re
from pathlib import Path

import anyio
import pytest

from environments.rewards import ScoreRange, make_reward, score_samples
from environments.rewards.registry import BUILT_IN, load_reward

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "rewards.md"
NEEDED = {"pattern": {"pattern": "x"}, "pairwise": {"judge": lambda left, right: 0.5}}
SAMPLES = [
    {"prompt": "p", "completion": text, "answer": "4", "token_count": length}
    for length in (1, 600, 5000)
    for text in ("#### 4", "a b c a b c a b c", "<think>x</think> <answer>4</answer>", "x", "")
]


def rows():
    return [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `\w+` \| `\w+` \|", line)
    ]


def test_the_table_has_each_registered_reward_with_its_class_range_and_formula():
    expected = [
        [
            f"`{name}`",
            f"`{load_reward(name).__name__}`",
            str(make_reward(name, NEEDED.get(name)).range),
            load_reward(name).formula,
        ]
        for name in sorted(BUILT_IN)
    ]
    assert rows() == expected


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_scores_stay_in_the_range_that_is_stated(name, verifier):
    params = dict(NEEDED.get(name, {}))
    if name in {"accuracy", "cosine", "r1_zero"}:
        params["verifier"] = verifier
    reward = make_reward(name, params)
    scores = anyio.run(score_samples, reward, SAMPLES)
    assert all(reward.range.low <= score <= reward.range.high for score in scores)
    assert len(set(scores)) > 1 or name == "pairwise"


def test_a_range_without_an_end_is_written_as_open():
    assert str(ScoreRange(-math.inf, 1.0)) == "(-inf, 1]"


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
