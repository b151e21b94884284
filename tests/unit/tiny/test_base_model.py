"""The base models: their skill is rarely used. Those that are not in the cache are created, in about a minute each."""

import pytest

from example_trainer.tiny import ensure_base
from example_trainer.tiny.cache import read_report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.e2e), pytest.param(2, marks=pytest.mark.e2e)])
def test_the_base_of_the_demo_rarely_uses_its_skill(seed):
    report = read_report(ensure_base("chain", seed))
    assert 0.20 <= report.pass_rate <= 0.35
    assert report.greedy_accuracy <= 0.15
    assert 10 <= report.mean_length_tokens <= 17


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_base_of_the_second_task_samples_worse_than_it_knows():
    report = read_report(ensure_base("add", 0))
    assert 0.3 <= report.pass_rate <= 0.6
    assert report.greedy_accuracy > report.pass_rate
