"""However full the queue is: an environment without whose groups no batch can be made is never paused."""

import pytest


def test_a_queue_that_fills_no_batch_leaves_room_for_what_completes_it(desk):
    threes, fives = desk.register("threes", 3), desk.register("fives", 5)
    desk.begin(batch_size=8, max_staleness=0)
    desk.send(threes, 1, 2, 3, size=3)
    assert (desk.room(threes), desk.room(fives)) == (0, 5)
    desk.send(fives, 4, size=5)
    assert (desk.room(threes), desk.room(fives)) == (0, 0)
    assert desk.batch(1) == [1, 4]


def test_the_same_holds_for_environments_that_heed_the_queue_only(desk):
    threes, fives = desk.register("threes", 3), desk.register("fives", 5)
    desk.begin(batch_size=8, max_staleness=0)
    desk.send(threes, *range(1, 12), size=3)
    assert desk.legacy.status.status_env(threes).queue_size * 3 >= 3 * 8
    assert desk.legacy.status.status_env(fives).queue_size == 0


def test_an_environment_below_its_minimum_has_room(desk):
    slow, fast = desk.register("slow", min_batch_allocation=0.5), desk.register("fast")
    desk.begin(batch_size=8, max_staleness=0)
    desk.send(fast, 1, 2, 3)
    assert desk.batch(1) is None
    assert (desk.room(slow), desk.room(fast)) == (4, 0)
    desk.send(slow, 4)
    assert desk.room(slow) == 0
    assert desk.batch(1) == [1, 4]


def test_there_is_no_room_once_the_last_batch_is_formed(desk):
    threes, fives = desk.register("threes", 3), desk.register("fives", 5)
    desk.begin(batch_size=8, num_steps=1)
    desk.send(threes, 1, 2, 3, 4, size=3)
    desk.send(fives, 5, size=5)
    assert desk.batch(1) == [1, 5]
    assert (desk.room(threes), desk.room(fives)) == (0, 0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_in_training_is_no_shortage(desk, trained):
    env = desk.register()
    desk.begin(batch_size=8, max_staleness=0)
    desk.send(env, 1, 2)
    desk.batch(1)
    if trained:
        desk.publish(1, 1)
    assert desk.room(env) == (8 if trained else 0)
