"""The phrases that people search for are in our messages literally, and on the troubleshooting page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from atropos_api.common import metric_names as names
from atropos_api.wire import Batch, Group
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings, prepare_batch
from example_trainer.errors import MissingLogprobs
from example_trainer.monitoring.health import HealthMonitor

ROOT = Path(__file__).parents[3]
TROUBLESHOOTING = ROOT / "docs/howto/troubleshooting.md"
PACKAGES = ("atropos_api", "environments", "example_trainer")
PHRASES = [
    "GRPO requires inference_logprobs for importance sampling",
    "Parameter mapping file not found",
    "PEFT library not available",
    "Atropos API not reachable",
    "ref_logprobs avg",
    "(should be negative!)",
    "inference_logprobs alignment is wrong",
    "Logprob gap: ref=",
    "inference_logprobs found in batch",
]


@pytest.fixture(scope="module")
def messages() -> str:
    """Return every string of the three packages; adjacent literals are joined."""
    found: list[str] = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_that_people_search_for_is_in_our_messages_and_on_the_page(messages: str, phrase: str) -> None:
    assert phrase in messages
    assert phrase in TROUBLESHOOTING.read_text(encoding="utf-8")


def test_every_sign_of_trouble_is_on_the_page() -> None:
    page = TROUBLESHOOTING.read_text(encoding="utf-8")
    for word in (
        "mean_ratio",
        "clipped_fraction",
        "diff_abs_mean",
        "diverging KL",
        "flat reward",
        "tokens/s",
        "repetitive",
    ):
        assert re.search(rf"^\|.*{re.escape(word)}", page, re.MULTILINE), word


def test_a_trained_token_without_a_logprob_names_environment_and_index() -> None:
    group = Group(
        tokens=[[1, 2, 3], [1, 2, 4]],
        masks=[[-100, 2, 3], [-100, 2, 4]],
        scores=[0.0, 1.0],
        inference_logprobs=[[1.0, -0.5, -0.5], [1.0, -0.5, 1.0]],
        env_id=6,
    )
    batch = Batch(number=1, run_id="r", groups=[group])
    with pytest.raises(
        MissingLogprobs, match=r"importance sampling: environment 6, sequence 1 of its group: 1 at trained"
    ):
        prepare_batch(batch, data_settings(TrainingConfig(model_name="m")))


def test_misaligned_logprobs_are_reported_in_the_words_of_the_guide() -> None:
    means = {names.LOGPROBS_INFERENCE_MEAN: 0.85, names.LOGPROBS_TRAINING_MEAN: -1.5}
    told = [event.message for event in HealthMonitor().check(1, means)]
    assert told[0].startswith("ref_logprobs avg 0.850 (should be negative!)")
    assert told[1] == "Logprob gap: ref=0.850, train=-1.500"
