"""With a JSON Lines file and a short function, without a class, one command makes the reward rise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from environments.tasks.arithmetic import problem_stream

from .conftest import Launched

ROOT = Path(__file__).resolve().parents[2]
STEPS, WINDOW = 12, 3
REWARD = r"""
import re

def right(completions, result, **columns):
    found = [re.search(r"#### (-?\d+)", str(text)) for text in completions]
    return [float(bool(one) and int(one[1]) == wanted) for one, wanted in zip(found, result)]
"""
LEAST_RISE = 0.2
"""Smallest rise of the mean reward over a window; 0.37 was seen after 12 steps."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_file_of_prompts_and_a_function_train(start_launcher: Callable[..., Launched], tmp_path: Path) -> None:
    problems = problem_stream("chain", seed=5)
    lines = [json.dumps({"prompt": one.question, "result": one.answer}) for one in islice(problems, 400)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "rewards.py").write_text(REWARD)
    run = start_launcher(
        *(sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml")),
        *("--env", "dataset_server.py", "--env.data-path", str(tmp_path / "prompts.jsonl")),
        *("--env.reward", f"{tmp_path / 'rewards.py'}:right", "--env.max-new-tokens", "34"),
        *("--env.eval_at_start", "false", "--env.eval_at_end", "false", "--training-steps", str(STEPS)),
        run_dir=tmp_path / "run",
    )
    code, _, error = run.end(500)
    assert code == 0, error + run.logs()
    rewards = [json.loads(line)["reward/mean"] for line in run.metrics.read_text().splitlines()]
    assert len(rewards) == STEPS
    assert sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW >= LEAST_RISE, rewards
