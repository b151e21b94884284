"""An environment without whose groups no batch can be made is never paused, however full the queue is."""

import pytest


def test_a_queue_that_fills_no_batch_leaves_room_for_what_completes_it(broker):
    threes, fives = broker.register("threes", 3), broker.register("fives", 5)
    broker.begin(batch_size=8, max_staleness=0)
    broker.send(threes, 1, 2, 3, size=3)
    assert (broker.room(threes), broker.room(fives)) == (0, 5)
    broker.send(fives, 4, size=5)
    assert (broker.room(threes), broker.room(fives)) == (0, 0)
    assert broker.batch(1) == [1, 4]


def test_the_same_holds_for_environments_that_heed_the_queue_only(broker):
    threes, fives = broker.register("threes", 3), broker.register("fives", 5)
    broker.begin(batch_size=8, max_staleness=0)
    broker.send(threes, *range(1, 12), size=3)
    assert broker.legacy.status.status_env(threes).queue_size * 3 >= 3 * 8
    assert broker.legacy.status.status_env(fives).queue_size == 0


def test_an_environment_below_its_minimum_has_room(broker):
    slow, fast = broker.register("slow", min_batch_allocation=0.5), broker.register("fast")
    broker.begin(batch_size=8, max_staleness=0)
    broker.send(fast, 1, 2, 3)
    assert broker.batch(1) is None
    assert (broker.room(slow), broker.room(fast)) == (4, 0)
    broker.send(slow, 4)
    assert broker.room(slow) == 0
    assert broker.batch(1) == [1, 4]


def test_there_is_no_room_once_the_last_batch_is_formed(broker):
    threes, fives = broker.register("threes", 3), broker.register("fives", 5)
    broker.begin(batch_size=8, num_steps=1)
    broker.send(threes, 1, 2, 3, 4, size=3)
    broker.send(fives, 5, size=5)
    assert broker.batch(1) == [1, 5]
    assert (broker.room(threes), broker.room(fives)) == (0, 0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_in_training_is_not_a_shortage(broker, trained):
    env = broker.register()
    broker.begin(batch_size=8, max_staleness=0)
    broker.send(env, 1, 2)
    broker.batch(1)
    if trained:
        broker.publish(1, 1)
    assert broker.room(env) == (8 if trained else 0)
