"""A publish waits for running requests as long as that loses less generation than computing them again."""

import itertools

import pytest

from example_trainer.serving.drain import plan_drain
from example_trainer.serving.vllm.step_times import StepTimes


def running(*, generated, lengths, limit=10_000, prompt=20, **figures):
    computed = [prompt + tokens for tokens in generated]
    return {
        "computed_tokens": computed,
        "tokens": computed,
        "generated_tokens": list(generated),
        "token_limits": [limit] * len(computed),
        "waiting": 0,
        "distinct_tokens": sum(computed),
        "last_lengths": list(lengths),
        "step_seconds": 0.01,
        "request_seconds": 0.0,
        "prefill_seconds": 1e-4,
    } | figures


def test_outputs_that_are_about_to_end_are_waited_for():
    plan = plan_drain(running(generated=[28] * 8, lengths=[32] * 50), 0.5)
    assert plan.seconds == pytest.approx(0.04)
    assert plan.expected_loss_seconds < 8 * 48 * 1e-4


def test_long_outputs_are_paused_at_once_for_what_it_costs_to_compute_them_again():
    plan = plan_drain(running(generated=range(0, 1000, 10), lengths=[1000] * 100, prefill_seconds=1e-6), 0.5)
    assert plan.seconds == 0
    assert plan.expected_loss_seconds == pytest.approx(sum(range(20, 1020, 10)) * 1e-6)


def test_a_dear_prefill_is_avoided_by_waiting_up_to_the_limit_and_never_longer():
    dear = running(generated=[500] * 4, lengths=[600] * 50, prefill_seconds=0.1)
    assert plan_drain(dear, 5.0).seconds == pytest.approx(1.0, rel=0.1)  # 100 steps
    assert plan_drain(dear, 0.0).seconds == 0
    gradual = running(generated=[500] * 4, lengths=range(501, 560), prefill_seconds=0.1)
    assert plan_drain(gradual, 0.5).seconds == 0.5


def test_the_limit_of_a_request_is_known_whatever_others_did_before_it():
    plan = plan_drain(running(generated=[30] * 4, lengths=[1000] * 4, limit=32), 0.5)
    assert plan.seconds == pytest.approx(0.02)


def test_until_as_many_outputs_have_ended_as_run_the_whole_limit_is_waited_for():
    """The first that end are the shortest: by these alone all others would seem to go on to their limits."""
    for lengths in ([], [3] * 127):
        assert plan_drain(running(generated=[8] * 128, lengths=lengths, limit=1000), 0.5).seconds == 0.5
    assert plan_drain(running(generated=[8] * 128, lengths=[3] * 128, limit=1000), 0.5).seconds == 0
    assert plan_drain(running(generated=[8] * 1000, lengths=[3] * 512, limit=1000), 0.5).seconds == 0


def test_without_requests_or_times_nothing_is_waited_for():
    assert plan_drain(running(generated=[], lengths=[5]), 0.5).seconds == 0
    assert plan_drain(running(generated=[3], lengths=[5], step_seconds=0.0, prefill_seconds=0.0), 0.5).seconds == 0


def test_places_that_waiting_requests_take_are_not_lost():
    half = {"generated": [28, 1] * 8, "lengths": [32] * 50, "prefill_seconds": 4e-5}
    alone, followed = (plan_drain(running(**half, waiting=waiting), 0.5) for waiting in (0, 100))
    assert followed.seconds > alone.seconds
    assert followed.expected_loss_seconds < alone.expected_loss_seconds


def test_after_a_part_of_the_wait_the_places_of_ended_requests_still_count():
    rest = running(generated=[20] * 2, lengths=[32] * 50, prefill_seconds=1e-3)
    assert plan_drain(rest, 0.5).seconds > 0
    assert plan_drain(rest, 0.5, places=64).seconds == 0


def test_a_request_that_has_not_begun_costs_nothing_unless_the_wait_lets_it_begin():
    begun = running(generated=[0] * 64, lengths=[1000] * 64)
    not_begun = begun | {"computed_tokens": [0] * 64, "distinct_tokens": 0}
    assert plan_drain(begun, 0.5).expected_loss_seconds == pytest.approx(64 * 20 * 1e-4)
    assert plan_drain(not_begun, 0.5) == plan_drain(not_begun, 0.0)
    assert plan_drain(not_begun, 0.5).expected_loss_seconds == 0


def test_a_prefix_that_requests_share_is_computed_again_once():
    apart = running(generated=[500] * 8, lengths=[10_000] * 8, prompt=1000, prefill_seconds=1e-6)
    shared = apart | {"distinct_tokens": 1000 + 8 * 500}
    losses = [plan_drain(one, 0.5).expected_loss_seconds for one in (apart, shared)]
    assert losses == pytest.approx([8 * 1500e-6, 5000e-6])


def test_the_loss_that_came_counts_idle_places_and_discarded_tokens():
    plan = plan_drain(running(generated=[28] * 8, lengths=[32] * 50, request_seconds=0.01 / 8), 0.5)
    assert plan.loss_seconds(0.0, 0) == 0
    assert plan.loss_seconds(0.2, 100) == pytest.approx(0.2 / 2 + 100 * 1e-4)


def times_of(*steps):
    """Return the times after steps of (requests, tokens, seconds), one directly after the other."""
    ends = itertools.accumulate((seconds for _, _, seconds in steps), initial=0.0)
    times = StepTimes(clock=lambda: next(ends))
    times.end_step(1, 1, goes_on=True)
    for requests, tokens, _ in steps:
        times.end_step(requests, tokens, goes_on=True)
    return times


def test_the_parts_of_a_steps_time_are_told_apart():
    sizes = [(requests, requests + prefill) for requests in (4, 64, 128) for prefill in (0, 0, 300, 40)] * 30
    times = times_of(*((n, tokens, 0.01 + 1e-4 * n + 2e-5 * (tokens - n)) for n, tokens in sizes))
    assert times.fit() == pytest.approx((0.01, 1e-4, 2e-5), rel=0.05)


def test_steps_of_one_size_have_a_fixed_time():
    fixed, request, token = times_of(*[(128, 128, 0.02)] * 50).fit()
    assert fixed == pytest.approx(0.02, rel=1e-3)
    assert (request, token) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_newer_steps_count_for_more():
    assert times_of(*[(8, 8, 0.05)] * 2000, *[(8, 8, 0.01)] * 3000).fit()[0] == pytest.approx(0.01, rel=0.05)


def test_the_time_after_a_pause_or_an_idle_time_is_not_a_steps_time():
    ends = iter([0.0, 0.01, 5.01, 5.02, 9.0, 9.01])
    times = StepTimes(clock=lambda: next(ends))
    times.end_step(1, 1, goes_on=True)
    times.end_step(1, 1, goes_on=False)
    times.end_step(1, 1, goes_on=True)  # five seconds later: nothing ran
    times.end_step(1, 1, goes_on=True)
    times.interrupt()
    times.end_step(1, 1, goes_on=True)
    times.end_step(1, 1, goes_on=True)
    assert times.fit()[0] == pytest.approx(0.01, rel=1e-3)


def test_without_any_step_all_times_are_zero():
    assert StepTimes().fit() == (0.0, 0.0, 0.0)
