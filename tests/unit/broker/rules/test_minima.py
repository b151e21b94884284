"""R15: minimum allocations delay a batch for a while, never for good; a silent environment's minimum is void."""

import pytest


@pytest.fixture
def pair(desk):
    """One with a minimum and nothing to send, one that could fill every batch."""
    bound, free = desk.register("bound", min_batch_allocation=0.5), desk.register("free")
    desk.begin()
    desk.send(free, 1, 2, 3, 4)
    return bound, free


@pytest.mark.parametrize("desk", [{"environment_timeout_seconds": 1e9}], indirect=True)
def test_a_minimum_is_waived_for_one_batch_after_the_wait(desk, pair):
    assert desk.batch(1) is None
    desk.now += 119
    assert desk.batch(1) is None
    desk.now += 1
    assert desk.batch(1) == [1, 2]
    assert desk.counters.minima_waived_total == 1
    waived = [event for event in desk.broker.state.events.after(0) if event.type == "minimum-waived"]
    assert waived[0].data["environment_ids"] == [pair[0]]
    assert desk.batch(2) is None


def test_the_minimum_of_a_silent_environment_is_void_at_once(desk, pair):
    desk.now += 61
    assert desk.batch(1) == [1, 2]
    assert desk.counters.minima_waived_total == 0


def test_any_request_is_a_sign_of_life(desk, pair):
    for sign in (desk.broker.heartbeat, desk.legacy.status.status_env):
        desk.now += 59
        sign(pair[0])
        desk.now += 30
        assert desk.batch(1) is None
        sign(pair[0])


def test_whoever_waits_looks_again_when_silence_or_patience_decides(desk, pair):
    assert desk.broker.batches.retry_at is None
    desk.batch(1)
    assert desk.broker.batches.retry_at == 1060.0
    desk.now = 1050.0
    desk.broker.heartbeat(pair[0])
    assert desk.broker.batches.retry_at == 1110.0
    desk.now = 1100.0
    desk.broker.heartbeat(pair[0])
    assert desk.broker.batches.retry_at == 1120.0


@pytest.mark.parametrize("desk", [{"environment_timeout_seconds": 1e9}], indirect=True)
def test_another_trainer_waits_anew(desk, pair):
    desk.batch(1)
    desk.now += 119
    desk.begin(resume=True)
    desk.now += 2
    assert desk.batch(1) is None


def test_a_restart_of_the_broker_is_no_silence_of_its_environments(desk, pair):
    desk.now += 3600
    desk.restart()
    assert desk.batch(1) is None
    desk.now += 61
    assert desk.batch(1) == [1, 2]


def test_queued_groups_of_a_silent_environment_stay_usable(desk, pair):
    desk.send(pair[0], 9)
    desk.now += 61
    assert [desk.batch(1), desk.batch(2)] == [[1, 2], [3, 4]]
    desk.send(pair[1], 10)
    assert desk.batch(3) == [9, 10]


def test_the_weight_of_a_silent_environment_goes_to_the_others(desk):
    heavy, light = desk.register("heavy", weight=3.0), desk.register("light", weight=1.0)
    desk.begin(batch_size=16, max_staleness=0)
    assert desk.room(light) == 4
    desk.now += 61
    assert desk.room(light) == 16
    assert desk.legacy.status.status_env(light).env_weight == 1.0
    desk.broker.heartbeat(heavy)
    assert desk.room(light) == 4


@pytest.mark.parametrize("desk", [{"environment_timeout_seconds": 1e9}], indirect=True)
def test_r15a_a_waived_minimum_takes_what_is_there(desk):
    bound, free = desk.register("bound", min_batch_allocation=1.0), desk.register("free")
    desk.begin()
    desk.send(free, 1, 2, 3)
    desk.send(bound, 4)
    assert desk.batch(1) is None
    desk.now += 120
    assert desk.batch(1) == [1, 4]
    assert desk.counters.minima_waived_total == 1


@pytest.mark.parametrize("desk", [{"min_allocation_wait_seconds": 0.0}], indirect=True)
def test_r15a_of_what_is_there_as_much_as_a_batch_can_hold(desk):
    bound, free = desk.register("bound", min_batch_allocation=1.0), desk.register("free", 3)
    desk.begin()
    desk.send(bound, 1, 2, size=1)
    desk.send(bound, 3, size=3)
    desk.send(free, 4, 5, 6, size=3)
    # Of its 1 + 1 + 3 a batch of 8 holds all, beside one 3 of the other; of the 3s alone none fills it.
    assert desk.batch(1) == [1, 2, 3, 4]


@pytest.mark.parametrize("desk", [{"min_allocation_wait_seconds": 0.0}], indirect=True)
def test_waiving_one_minimum_leaves_the_others(desk):
    desk.register("absent", min_batch_allocation=0.2)
    present, free = desk.register("present", min_batch_allocation=0.5), desk.register("free")
    desk.begin()
    desk.send(free, 1, 2)
    desk.send(present, 3)
    assert desk.batch(1) == [1, 3]
    assert desk.counters.minima_waived_total == 1
