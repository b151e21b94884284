"""A bound on the age of rollouts ends no run: a version that has become too old for it is published again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from atropos_api.testing import served_broker
from example_trainer.testing import RolloutThread, Sampler, ServingBridge

from .conftest import GROUP_SIZE, Workbench, even_tokens, hold_version_2

Reward = Callable[[Sequence[int]], float]


def train(bench: Workbench, reward: Reward = even_tokens, **settings: Any) -> ServingBridge:
    config = bench.config(batch_timeout=15, **settings)
    bridge = bench.bridge()
    with RolloutThread(bench.url, bridge, Sampler(bench.model, seed=1), reward, group_size=GROUP_SIZE) as rollouts:
        assert bench.trainer(config, bridge).run()
    assert rollouts.error is None
    return bridge


def equal_at_first(answers: int) -> Reward:
    """Return a reward that is the same for the first `answers`."""
    left = iter(range(answers))
    return lambda answer: 0.0 if next(left, None) is not None else even_tokens(answer)


def test_a_run_goes_on_after_steps_without_a_signal_at_any_bound_on_the_age(bench: Workbench) -> None:
    bridge = train(bench, equal_at_first(24), max_staleness=0)
    skipped = [line["train/skipped"] for line in bench.metrics(bench.config())]
    assert skipped[0] == 1.0
    assert len(skipped) == 4
    assert len(bridge.published) == 5, "each batch needs weights of the step before, changed or not"


def test_the_brokers_own_bound_on_the_age_is_known_to_the_trainer(tiny_model: Any, tmp_path: Any) -> None:
    with served_broker(max_staleness=0) as url:
        bench = Workbench(url=url, model=tiny_model, directory=tmp_path)
        assert len(train(bench, equal_at_first(24)).published) == 5
        bench.close()


def test_weights_are_published_more_often_than_the_interval_says_if_rollouts_would_be_too_old(bench: Workbench) -> None:
    assert len(train(bench, max_staleness=1, vllm_restart_interval=3).published) == 3


def test_a_run_goes_on_when_an_evaluation_lets_go_of_a_version_that_has_become_too_old(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold_version_2(bench, monkeypatch, seconds=4.0)
    bridge = train(bench, max_staleness=0)
    (_, before), (_, after) = bridge.published[1:3]
    assert len(held) == 1
    assert after - before > 3.0
    assert bench.status()["counters"]["publishes_while_held_total"] == 1, "that in which the hold began"
