"""The trainer's waits are told from their beginning, whatever the length of its requests."""

from atropos_api.broker.activity import BETWEEN_REQUESTS_SECONDS, Wait


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
