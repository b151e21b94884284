"""R15: minimum allocations delay a batch for a limited time; a silent environment's minimum is ignored."""

import pytest


@pytest.fixture
def two_environments(broker):
    """Register an environment with a minimum and nothing to send, and one that could fill every batch."""
    bound, free = broker.register("bound", min_batch_allocation=0.5), broker.register("free")
    broker.begin()
    broker.send(free, 1, 2, 3, 4)
    return bound, free


@pytest.mark.parametrize("broker", [{"environment_timeout": 1e9}], indirect=True)
def test_a_minimum_is_waived_for_one_batch_after_the_wait(broker, two_environments):
    assert broker.batch(1) is None
    broker.now += 119
    assert broker.batch(1) is None
    broker.now += 1
    assert broker.batch(1) == [1, 2]
    assert broker.counters.minima_waived_total == 1
    waived = [event for event in broker.inner.state.events.after(0) if event.type == "minimum-waived"]
    assert waived[0].data["environment_ids"] == [two_environments[0]]
    assert broker.batch(2) is None


def test_the_minimum_of_a_silent_environment_is_void_at_once(broker, two_environments):
    broker.now += 61
    assert broker.batch(1) == [1, 2]
    assert broker.counters.minima_waived_total == 0


def test_any_request_is_a_sign_of_life(broker, two_environments):
    for sign in (broker.inner.heartbeat, broker.legacy.status.status_env):
        broker.now += 59
        sign(two_environments[0])
        broker.now += 30
        assert broker.batch(1) is None
        sign(two_environments[0])


def test_a_wait_for_minima_is_looked_at_again_when_silence_or_patience_decides(broker, two_environments):
    assert broker.inner.batches.retry_at is None
    broker.batch(1)
    assert broker.inner.batches.retry_at == 1060.0
    broker.now = 1050.0
    broker.inner.heartbeat(two_environments[0])
    assert broker.inner.batches.retry_at == 1110.0
    broker.now = 1100.0
    broker.inner.heartbeat(two_environments[0])
    assert broker.inner.batches.retry_at == 1120.0


@pytest.mark.parametrize("broker", [{"environment_timeout": 1e9}], indirect=True)
def test_another_trainer_waits_anew(broker, two_environments):
    broker.batch(1)
    broker.now += 119
    broker.begin(resume=True)
    broker.now += 2
    assert broker.batch(1) is None


def test_a_restart_of_the_broker_is_not_a_silence_of_its_environments(broker, two_environments):
    broker.now += 3600
    broker.restart()
    assert broker.batch(1) is None
    broker.now += 61
    assert broker.batch(1) == [1, 2]


def test_queued_groups_of_a_silent_environment_stay_usable(broker, two_environments):
    broker.send(two_environments[0], 9)
    broker.now += 61
    assert [broker.batch(1), broker.batch(2)] == [[1, 2], [3, 4]]
    broker.send(two_environments[1], 10)
    assert broker.batch(3) == [9, 10]


def test_the_weight_of_a_silent_environment_goes_to_the_others(broker):
    heavy, light = broker.register("heavy", weight=3.0), broker.register("light", weight=1.0)
    broker.begin(batch_size=16, max_staleness=0)
    assert broker.room(light) == 4
    broker.now += 61
    assert broker.room(light) == 16
    assert broker.legacy.status.status_env(light).env_weight == 1.0
    broker.inner.heartbeat(heavy)
    assert broker.room(light) == 4


@pytest.mark.parametrize("broker", [{"environment_timeout": 1e9}], indirect=True)
def test_r15a_a_waived_minimum_takes_what_is_there(broker):
    bound, free = broker.register("bound", min_batch_allocation=1.0), broker.register("free")
    broker.begin()
    broker.send(free, 1, 2, 3)
    broker.send(bound, 4)
    assert broker.batch(1) is None
    broker.now += 120
    assert broker.batch(1) == [1, 4]
    assert broker.counters.minima_waived_total == 1


@pytest.mark.parametrize("broker", [{"min_allocation_wait": 0.0}], indirect=True)
def test_r15a_of_what_is_there_as_much_as_a_batch_can_hold(broker):
    bound, free = broker.register("bound", min_batch_allocation=1.0), broker.register("free", 3)
    broker.begin()
    broker.send(bound, 1, 2, size=1)
    broker.send(bound, 3, size=3)
    broker.send(free, 4, 5, 6, size=3)
    # A batch of 8 holds all of its 1 + 1 + 3 and one 3 of the other; the 3s alone never fill a batch.
    assert broker.batch(1) == [1, 2, 3, 4]


@pytest.mark.parametrize("broker", [{"min_allocation_wait": 0.0}], indirect=True)
def test_waiving_one_minimum_leaves_the_others(broker):
    broker.register("absent", min_batch_allocation=0.2)
    present, free = broker.register("present", min_batch_allocation=0.5), broker.register("free")
    broker.begin()
    broker.send(free, 1, 2)
    broker.send(present, 3)
    assert broker.batch(1) == [1, 3]
    assert broker.counters.minima_waived_total == 1


def test_a_minimum_is_the_stated_share_and_not_the_product_of_its_float(broker):
    bound = broker.register("bound", group_size=1, min_batch_allocation=0.29)
    free = broker.register("free", group_size=1)
    broker.begin(batch_size=100)
    broker.send(free, *range(1, 101), size=1)
    broker.send(bound, *range(201, 231), size=1)
    assert sum(ident > 200 for ident in broker.batch(1)) == 29
