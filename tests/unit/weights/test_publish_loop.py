"""The rules of the publish loop: how often to publish, and how often to check that both sides agree."""

from __future__ import annotations

import pytest

from example_trainer.errors import ProofFailed
from example_trainer.weights import publish_loop
from example_trainer.weights.base import PublishReport
from example_trainer.weights.logprob_parity import Agreement, Difference
from example_trainer.weights.publish_loop import ParityCheck, SyncBudget

LIMIT = Difference(maximum=1e-4, mean=5e-6)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def report(recomputed, generated):
    return PublishReport(version=1, seconds=0.1, recomputed_tokens=recomputed, generated_tokens=generated)


def test_nothing_recomputed_publishes_every_step_and_never_without_one():
    budget = SyncBudget(0.2)
    budget.note(report(0, 0))
    assert budget.allows(1)
    assert not budget.allows(0)


def test_recomputing_more_than_the_share_waits_until_the_window_has_passed():
    clock = Clock()
    budget = SyncBudget(0.2, clock=clock)
    budget.note(report(300, 1000))
    assert budget.used_share() == 0.3
    assert not budget.allows(3)
    clock.now += 10.1
    assert budget.allows(3)


def test_enough_generated_tokens_allow_it_again_before_that():
    clock = Clock()
    budget = SyncBudget(0.2, clock=clock)
    budget.note(report(300, 1000))
    clock.now += 1
    budget.note(report(0, 1000))
    assert budget.allows(1)


def test_the_staleness_bound_outranks_the_budget():
    budget = SyncBudget(0.2, most_steps=4)
    budget.note(report(900, 1000))
    assert [budget.allows(steps) for steps in (1, 3, 4)] == [False, False, True]


def test_publishes_that_come_at_each_step_are_forgotten_although_no_share_is_asked_for():
    clock = Clock()
    budget = SyncBudget(0.2, most_steps=1, clock=clock)
    for _ in range(1000):
        budget.note(report(300, 1000))
        assert budget.allows(1), "the bound on staleness needs it"
        clock.now += 1
    assert len(budget._publishes) <= 12


def test_where_the_servers_tell_their_losses_the_time_counts_and_no_token():
    clock = Clock()
    budget = SyncBudget(0.2, counts_time=True, clock=clock)
    for _ in range(3):
        budget.note(PublishReport(version=1, seconds=0.5, recomputed_tokens=900, generated_tokens=1000))
        assert budget.allows(1), "tokens that are computed again cost little of a second"
    for _ in range(4):
        assert budget.allows(1)
        budget.note(PublishReport(version=1, seconds=0.5, loss_seconds=0.6))
    assert not budget.allows(1), "2.4 of the last ten seconds are lost"
    clock.now += 10.1
    budget.note(PublishReport(version=1, seconds=0.5, loss_seconds=2.4, server_count=2))
    assert budget.allows(1), "of two servers, each has lost 1.2 seconds"


def test_a_server_that_generated_nothing_does_not_divide_by_zero():
    budget = SyncBudget(0.2)
    budget.note(report(50, 0))
    assert not budget.allows(1)


def test_every_nth_sync_is_proven():
    every_third, none = ParityCheck(every=3), ParityCheck(every=0)
    assert [every_third.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not any(none.is_due() for _ in range(3))


def test_automatic_checks_take_at_most_a_hundredth_of_the_time(monkeypatch):
    clock, checks = Clock(), []

    def check(*_, limit, **__):
        checks.append(clock.now)
        clock.now += 0.5
        return Agreement(tokens=1, difference=LIMIT, limit=LIMIT)

    monkeypatch.setattr(publish_loop, "prove", check)
    automatic = ParityCheck(every=None, clock=clock)
    for publish in range(200):
        if automatic.is_due() or not publish:
            automatic.run(object(), dict, version=publish, boot_id="boot", max_model_len=64)
        clock.now += 1.0
    assert 2 <= len(checks) <= 4
    assert 0.5 * (len(checks) - 1) <= 0.01 * (clock.now - 100.0)


def test_an_automatic_check_beyond_the_first_limit_measures_the_limit_of_the_present_weights(monkeypatch):
    asked = []

    def check(*_, limit, **__):
        asked.append(limit)
        if limit is not None:
            raise ProofFailed("beyond the limit")
        return Agreement(tokens=1, difference=LIMIT, limit=LIMIT)

    monkeypatch.setattr(publish_loop, "prove", check)
    automatic, every = ParityCheck(every=None), ParityCheck(every=1)
    for each in (automatic, every):
        each.run(object(), dict, version=1, boot_id="boot", max_model_len=64)
    automatic.run(object(), dict, version=2, boot_id="boot", max_model_len=64)
    with pytest.raises(ProofFailed):
        every.run(object(), dict, version=2, boot_id="boot", max_model_len=64)
    assert asked == [None, None, LIMIT, None, LIMIT, LIMIT], "the others are given other tokens"


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("every", [None, 0, 1])
def test_the_first_check_is_repeated_once_with_other_tokens_before_it_ends_a_run(monkeypatch, every, failures):
    """One ill-conditioned token of 2,048 has been 1.14e-4 off in a sound demo, where 1e-4 is the limit."""
    left = [failures]

    def check(*_, limit, **__):
        left[0] -= 1
        if left[0] >= 0:
            raise ProofFailed("beyond the limit")
        return Agreement(tokens=1, difference=LIMIT, limit=LIMIT)

    monkeypatch.setattr(publish_loop, "prove", check)
    parity = ParityCheck(every=every)
    if failures == 1:
        parity.run(object(), dict, version=1, boot_id="boot", max_model_len=64)
    else:
        with pytest.raises(ProofFailed):
            parity.run(object(), dict, version=1, boot_id="boot", max_model_len=64)
    assert parity.proven == ({"boot"} if failures == 1 else set())
