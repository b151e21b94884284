"""The trainer's waits are told from their beginning, whatever the length of its requests."""

from atropos_api.broker.activity import BETWEEN_REQUESTS_SECONDS, Activity, Totals, Wait


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_lasts_over_long_polls_that_bring_nothing() -> None:
    clock, wait = Clock(), Wait()
    for _ in range(3):
        wait.note(clock(), 5)
        with wait.request(clock):
            clock.now += 30.0
        clock.now += 0.5
    assert wait.seconds(clock()) == 91.5


def test_a_wait_ends_with_a_pause_and_another_thing_is_another_wait() -> None:
    clock, wait = Clock(), Wait()
    wait.note(clock(), 5)
    with wait.request(clock):
        clock.now += 30.0
    wait.note(clock(), 6)
    clock.now += 1.0
    assert wait.seconds(clock()) == 1.0
    clock.now += BETWEEN_REQUESTS_SECONDS
    assert wait.seconds(clock()) is None


def test_the_first_rates_after_a_night_without_watchers_are_those_of_now() -> None:
    activity = Activity()
    for now, groups in ((0.0, 0.0), (2.0, 2.0)):
        rates = activity.rates(Totals(now, groups=groups))
    assert rates is not None
    assert rates.groups == 1.0
    night = 36_000.0
    assert activity.rates(Totals(night, groups=30_000.0)) is None, "the mean over the night is not the rate of now"
    rates = activity.rates(Totals(night + 2.0, groups=30_000.0))
    assert rates is not None
    assert rates.groups == 0.0, "it stands still since long before"


def test_a_caller_once_a_minute_is_told_the_rates_of_that_minute() -> None:
    activity = Activity()
    rates = [activity.rates(Totals(60.0 * at, groups=60.0 * at * at)) for at in range(4)]
    assert [one and one.groups for one in rates] == [None, 1.0, 3.0, 5.0]
