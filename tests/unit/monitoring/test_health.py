"""Signs of a failing run: each is reported at the guides' thresholds, once, with advice; a healthy run has none."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from atropos_api.common import metric_names as names
from example_trainer.config import TrainingConfig
from example_trainer.monitoring.health import HealthMonitor, parse_limits, sign_names, sign_table

HEALTHY = {
    names.REWARD_MEAN: 0.6,
    names.REWARD_STD: 0.49,
    names.TRAIN_LOSS: -0.02,
    names.TRAIN_KL: 0.01,
    names.TRAIN_SKIPPED: 0.0,
    names.MEAN_RATIO: 1.01,
    names.CLIPPED_FRACTION: 0.05,
    names.LOGPROBS_INFERENCE_MEAN: -0.9,
    names.LOGPROBS_TRAINING_MEAN: -0.92,
    names.ALIGNMENT_DIFF_ABS_MEAN: 1e-6,
    names.RESPONSE_REPETITION: 0.1,
    names.TOKENS_PER_SECOND: 1000.0,
}

AT_ONCE = [
    ("mean_ratio", {names.MEAN_RATIO: 0.79}),
    ("mean_ratio", {names.MEAN_RATIO: 1.21}),
    ("clipped_fraction", {names.CLIPPED_FRACTION: 0.31}),
    ("loss", {names.TRAIN_LOSS: -10.1}),
    ("kl", {names.TRAIN_KL: 1.01}),
    ("kl", {names.TRAIN_KL_REFERENCE: 1.01}),
    ("alignment", {names.ALIGNMENT_DIFF_ABS_MEAN: 0.11}),
    ("repetition", {names.RESPONSE_REPETITION: 0.51}),
    ("reference_logprobs", {names.LOGPROBS_INFERENCE_MEAN: 0.85}),
    ("logprob_gap", {names.LOGPROBS_INFERENCE_MEAN: -3.0}),
    ("left_out", {names.SEQUENCES: 10.0, names.LEFT_OUT.format(cause="overlong"): 6.0}),
    ("left_out", {names.SEQUENCES: 10.0, names.LEFT_OUT.format(cause="no_trained_token"): 6.0}),
]
AT_THE_LIMIT = {
    names.MEAN_RATIO: 1.2,
    names.CLIPPED_FRACTION: 0.3,
    names.TRAIN_LOSS: -10.0,
    names.TRAIN_KL: 1.0,
    names.ALIGNMENT_DIFF_ABS_MEAN: 0.1,
    names.RESPONSE_REPETITION: 0.5,
    names.LOGPROBS_INFERENCE_MEAN: -2.92,
    names.SEQUENCES: 10.0,
    names.LEFT_OUT.format(cause="overlong"): 5.0,
    names.LEFT_OUT.format(cause="truncated"): 5.0,
}


def signs(monitor: HealthMonitor, step: int, metrics: dict[str, float]) -> list[str]:
    return [event.sign for event in monitor.check(step, metrics)]


def test_a_healthy_run_has_no_signs() -> None:
    monitor = HealthMonitor()
    assert [signs(monitor, step, HEALTHY) for step in range(1, 30)] == [[]] * 29
    assert signs(monitor, 30, HEALTHY | AT_THE_LIMIT) == []


@pytest.mark.parametrize(("sign", "metrics"), AT_ONCE)
def test_a_value_over_its_limit_is_one_event_with_the_value_and_advice(sign: str, metrics: dict[str, float]) -> None:
    monitor = HealthMonitor()
    (event,) = monitor.check(4, HEALTHY | metrics)
    assert (event.sign, event.step) == (sign, 4)
    assert event.message
    assert event.advice
    assert monitor.check(5, HEALTHY | metrics) == [], "it lasts, so nothing is logged again"
    assert monitor.check(6, HEALTHY) == []
    assert signs(monitor, 7, HEALTHY | metrics) == [sign], "it occurs again"


def test_five_batches_without_differences_are_a_flat_reward() -> None:
    monitor = HealthMonitor()
    found = [signs(monitor, step, HEALTHY | {names.TRAIN_SKIPPED: 1.0}) for step in range(1, 8)]
    assert found == [[], [], [], [], ["flat_reward"], [], []]


def test_five_batches_with_hardly_a_signal_are_reported_and_one_with_a_signal_begins_anew() -> None:
    monitor = HealthMonitor()
    shares = [0.94, 0.97, 0.9, 0.94, 0.8, 0.94, 0.94, 1.0, 0.94, 0.94, 0.9]
    events = [monitor.check(step, HEALTHY | {names.NO_SIGNAL_FRACTION: share}) for step, share in enumerate(shares)]
    assert [[event.sign for event in found] for found in events] == [*[[]] * 9, ["no_signal"], []]
    (event,) = events[9]
    assert event.value == pytest.approx(0.952)
    assert "larger --env.group_size" in event.advice


def test_batches_without_any_signal_are_one_sign_and_not_two() -> None:
    monitor = HealthMonitor()
    flat = HEALTHY | {names.TRAIN_SKIPPED: 1.0, names.NO_SIGNAL_FRACTION: 1.0}
    assert [signs(monitor, step, flat) for step in range(6)] == [*[[]] * 4, ["flat_reward"], []]


def test_steps_that_are_skipped_for_length_are_not_a_flat_reward() -> None:
    monitor = HealthMonitor()
    skipped = {names.TRAIN_SKIPPED: 1.0, names.NO_SIGNAL_FRACTION: 0.0, names.SEQUENCES: 4.0}
    metrics = HEALTHY | skipped | {names.LEFT_OUT.format(cause="overlong"): 4.0}
    assert [signs(monitor, step, metrics) for step in range(1, 8)] == [["left_out"], *[[]] * 6]


def test_batches_that_are_left_out_for_their_age_are_not_a_flat_reward() -> None:
    monitor = HealthMonitor()
    aged = {names.TRAIN_SKIPPED: 1.0, names.NO_SIGNAL_FRACTION: 0.25, names.TRAINED_TOKENS: 40.0}
    assert [signs(monitor, step, HEALTHY | aged) for step in range(1, 8)] == [[]] * 7


def test_an_accuracy_that_collapses_is_reported_and_noise_is_not() -> None:
    monitor = HealthMonitor()
    rewards = [0.59, 0.55, 0.62, 0.5, 0.6, 0.64, 0.52, 0.58] + [0.07] * 5
    found = [signs(monitor, step, HEALTHY | {names.REWARD_MEAN: reward}) for step, reward in enumerate(rewards)]
    assert [sign for step in found for sign in step] == ["reward_drop"]
    assert not any(found[:8])


def test_a_rate_that_halves_is_reported() -> None:
    monitor = HealthMonitor()
    rates = [1000.0] * 12 + [400.0] * 5
    found = [signs(monitor, step, HEALTHY | {names.TOKENS_PER_SECOND: rate}) for step, rate in enumerate(rates)]
    assert [sign for step in found for sign in step] == ["rate_drop"]
    assert not any(found[:12])


def test_metrics_that_a_step_does_not_have_are_not_a_sign() -> None:
    assert HealthMonitor().check(1, {names.TRAIN_SKIPPED: 1.0}) == []


def test_every_sign_is_tried_here() -> None:
    assert {sign for sign, _ in AT_ONCE} | {"flat_reward", "no_signal", "reward_drop", "rate_drop"} == set(sign_names())
    assert len(sign_table()) == len(set(sign_names()))


def test_stop_on_takes_health_or_the_names_of_signs() -> None:
    assert TrainingConfig(model_name="m", stop_on=["health"]).stop_on == ["health"]
    assert TrainingConfig(model_name="m", stop_on=["kl", "loss"]).stop_on == ["kl", "loss"]
    with pytest.raises(ValidationError, match="klingon is not a health sign; use one of health, mean_ratio"):
        TrainingConfig(model_name="m", stop_on=["klingon"])


def test_a_resumed_run_is_judged_by_what_it_was_before() -> None:
    """The state is in the checkpoint's JSON: present signs are not reported again, counts and windows continue."""
    steps = [HEALTHY | {names.REWARD_MEAN: 0.6 + 0.01 * (step % 3)} for step in range(8)]
    steps += [HEALTHY | {names.TRAIN_KL: 2.0, names.TRAIN_SKIPPED: 1.0, names.TOKENS_PER_SECOND: 900.0}] * 3
    steps += [HEALTHY | {names.REWARD_MEAN: 0.05, names.TRAIN_SKIPPED: 1.0, names.TOKENS_PER_SECOND: 300.0}] * 6
    alone = HealthMonitor()
    expected = [signs(alone, step, metrics) for step, metrics in enumerate(steps)]
    assert {sign for found in expected for sign in found} == {"kl", "flat_reward", "reward_drop", "rate_drop"}
    for stop in (3, 9, 12, 15):
        before, after = HealthMonitor(), HealthMonitor()
        found = [signs(before, step, steps[step]) for step in range(stop)]
        after.remember(json.loads(json.dumps(before.memory())))
        assert found + [signs(after, step, steps[step]) for step in range(stop, len(steps))] == expected


def test_limits_are_set_by_name() -> None:
    limits = parse_limits(["mean_ratio=0.5-2", "clipped_fraction=0.9", "flat_steps=2", "reward_drop=inf"])
    assert (limits.mean_ratio, limits.clipped_fraction, limits.flat_steps) == ((0.5, 2.0), 0.9, 2)
    monitor = HealthMonitor(limits)
    assert signs(monitor, 1, HEALTHY | {names.MEAN_RATIO: 1.9, names.CLIPPED_FRACTION: 0.8}) == []
    assert signs(monitor, 2, HEALTHY | {names.MEAN_RATIO: 2.1, names.TRAIN_SKIPPED: 1.0}) == ["mean_ratio"]
    assert signs(monitor, 3, HEALTHY | {names.TRAIN_SKIPPED: 1.0}) == ["flat_reward"]
    assert TrainingConfig.model_validate({"model_name": "m", "health_limits": {"kl": 2}}).health_limits == ["kl=2"]
    for wrong, told in (("klingon=1", "one of mean_ratio, clipped_fraction"), ("kl", "name=value"), ("kl=x", "like 1")):
        with pytest.raises(ValidationError, match=told):
            TrainingConfig(model_name="m", health_limits=[wrong])
