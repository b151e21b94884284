"""The page on writing an environment works as written: its code trains by its commands, its control does not."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments.scaffold import write_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/howto/your-own-environment.md"
STEPS = 12

LONG = pytest.mark.skipif("ATROPOS_SCAFFOLD" not in os.environ, reason="another learning run: ATROPOS_SCAFFOLD=1")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def reward_of_run(start_launcher, tmp_path: Path) -> Callable[..., list[float]]:
    """Return the mean reward of each step when the page's environment is trained by the page's command."""
    text = PAGE.read_text()
    code = re.search(r"as `(\S+\.py)`.*?```python\n(.*?)```", text, re.DOTALL)
    command = re.search(r"^\| Train .*? \| `atropos-grpo-run (.*?)` \|$", text, re.MULTILINE)
    assert code is not None
    assert command is not None
    file = tmp_path / code[1]
    file.write_text(code[2])
    assert code[1] in command[1]

    def run(*flags: str) -> list[float]:
        words: Any = shlex.split(command[1].replace(code[1], str(file)))
        launched = start_launcher(
            *(sys.executable, "-m", "example_trainer.run", *words, *flags),
            *("--training-steps", str(STEPS), "--seed", "1", "--checkpoint-interval", "0"),
            *("--env.eval_at_start", "false", "--env.eval_at_end", "false"),
        )
        exit_code, _, error = launched.end(400)
        assert exit_code == 0, error + launched.logs()
        rows = [json.loads(line) for line in launched.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        return [row["reward/mean"] for row in rows]

    return run


def test_the_environment_of_the_page_is_learnt(reward_of_run) -> None:
    rewards = reward_of_run()
    assert mean(rewards[:2]) < 0.45
    assert mean(rewards[-4:]) > 0.7


@LONG
def test_with_advantages_shuffled_as_the_page_says_it_is_not(reward_of_run) -> None:
    """The run differs in one flag only, so any other cause of a rise would show here."""
    flags = re.search(r"^\| .*? \| the same with `(.*?)`: the curve must stay flat \|$", PAGE.read_text(), re.MULTILINE)
    assert flags is not None
    rewards = reward_of_run(*shlex.split(flags[1]))
    assert mean(rewards[-4:]) < 0.45


@LONG
def test_what_env_init_writes_is_learnt_with_its_own_run_file(start_launcher, tmp_path: Path) -> None:
    folder = write_environment("numbers", tmp_path)
    command = (sys.executable, "-m", "example_trainer.run", "--config", "run.yaml")
    launched = start_launcher(*command, cwd=folder, PYTHONPATH=str(ROOT))
    exit_code, _, error = launched.end(400)
    assert exit_code == 0, error + launched.logs()
    rewards = [json.loads(line)["reward/mean"] for line in launched.metrics.read_text().splitlines()]
    assert mean(rewards[-4:]) > mean(rewards[:2]) + 0.2


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
