"""The base models: their skill is rarely used. Those that do not come with the package are made, in a minute each."""

import os
from hashlib import sha256

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from example_trainer.tiny import ensure_base
from example_trainer.tiny.cache import SHIPPED_BASES, WEIGHTS_FILE, read_report, recipe_key
from example_trainer.tiny.make import make_base, measure

made_anew = pytest.mark.skipif(
    "ATROPOS_LEARNING" not in os.environ, reason="a minute for each model; ATROPOS_LEARNING=1 runs it"
)
SHIPPED = SHIPPED_BASES / "chain-0"


def check_that_its_skill_is_rarely_used(report):
    assert 0.20 <= report.pass_rate <= 0.35
    assert report.greedy_accuracy <= 0.15
    assert 10 <= report.mean_length_tokens <= 17


def test_the_base_of_the_demo_comes_with_the_package_made_by_the_recipe_as_it_is():
    """After a change to the recipe make it again, as `example_trainer.tiny` says."""
    assert ensure_base("chain", 0) == SHIPPED
    report = read_report(SHIPPED)
    assert report.recipe == recipe_key()
    assert report.weights_sha256 == sha256((SHIPPED / WEIGHTS_FILE).read_bytes()).hexdigest()
    check_that_its_skill_is_rarely_used(report)


def test_the_figures_of_the_shipped_base_are_those_of_its_weights():
    torch.manual_seed(0)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(SHIPPED), AutoTokenizer.from_pretrained(SHIPPED)
    accuracy, length = measure(model, tokenizer, "chain", temperature=1.0, samples=4)
    report = read_report(SHIPPED)
    assert accuracy == pytest.approx(report.pass_rate, abs=0.08)
    assert length == pytest.approx(report.mean_length_tokens, abs=1.5)


@made_anew
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_makes_a_base_that_rarely_uses_its_skill(seed, tmp_path):
    check_that_its_skill_is_rarely_used(make_base("chain", seed, tmp_path))


@made_anew
@pytest.mark.timeout(900)
def test_the_base_of_the_second_task_samples_worse_than_it_knows():
    report = read_report(ensure_base("add", 0))
    assert 0.3 <= report.pass_rate <= 0.6
    assert report.greedy_accuracy > report.pass_rate
