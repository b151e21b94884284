"""One command distils: the launcher starts student and teacher, and the student's distance from the teacher falls.

Four programs and two real vLLM servers take more than a minute, so `make test` omits it: `ATROPOS_DISTILLATION=1`.
`tests/unit/launcher/test_teacher.py` has the plan, and `test_launcher.py` a run over stand-ins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from environments.tasks.arithmetic import problem_stream

from .conftest import Launched

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not os.environ.get("ATROPOS_DISTILLATION"), reason="takes minutes; ATROPOS_DISTILLATION=1"),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS, WINDOW = 40, 3
LONGEST_ANSWER = 8
"""Maximum tokens of an answer: longer ones of a tiny model reach text on which neither model was trained."""
ASKED = "{question}\n"
"""A prompt other than the chat that both models were trained on, where they agree already."""
LARGEST_REST = 0.5
"""Largest share of the first step's divergence that may be left; 0.16 was seen, and 0.53 after half the steps."""


def test_a_student_comes_half_as_far_from_its_teacher_in_one_command(
    start_launcher: Callable[..., Launched], tmp_path: Path
) -> None:
    problems = islice(problem_stream("chain", seed=5), 400)
    lines = [json.dumps({"question": one.question, "answer": str(one.answer)}) for one in problems]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "asked.prompt").write_text(ASKED)
    run = start_launcher(
        *(sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml")),
        *("--env", "distill_server.py", "--data-path", str(tmp_path / "questions.jsonl")),
        *("--env.prompt-template", str(tmp_path / "asked.prompt"), "--eval-steps", "0"),
        *("--env.eval_at_start", "false", "--env.eval_at_end", "false"),
        *("--teacher.model_name", "tiny/chain:1", "--distill", "forward_kl", "--training-steps", str(STEPS)),
        *("--env.max-token-length", str(LONGEST_ANSWER), "--adam-eps", "1e-3"),
    )
    code, out, error = run.end(1100)
    assert code == 0, error + run.logs()
    assert "teacher ready" in out
    losses = [json.loads(line)["train/loss_distill"] for line in run.metrics.read_text().splitlines()]
    assert len(losses) == STEPS
    assert sum(losses[-WINDOW:]) / WINDOW <= LARGEST_REST * losses[0], losses
