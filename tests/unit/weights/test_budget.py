"""The rule that spaces publishes when they make the server compute too much again."""

from __future__ import annotations

from example_trainer.weights.base import PublishReport
from example_trainer.weights.publish_loop import SyncBudget


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
    assert budget.recomputed_fraction() == 0.3
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


def test_a_server_that_generated_nothing_does_not_divide_by_zero():
    budget = SyncBudget(0.2)
    budget.note(report(50, 0))
    assert not budget.allows(1)
