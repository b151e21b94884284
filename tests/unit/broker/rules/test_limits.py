"""Each option of the operator changes what it says."""

import pytest

from atropos_api.broker import BrokerSettings
from atropos_api.errors import BatchOutOfOrder, CommittedBatch, InvalidGroup, QueueFull


def give_up_a_version(desk):
    """Resume the run from a checkpoint that is older than its published version 2."""
    env = desk.register()
    desk.begin()
    desk.publish(1, 0)
    desk.publish(2, 1)
    desk.send(env, 1, 2, version=2)
    desk.send(env, 3, 4, version=1)
    desk.begin(resume=True, resume_from_batch=0)
    desk.publish(3, 0)


def test_orphaned_groups_are_trained_and_counted(desk):
    give_up_a_version(desk)
    assert desk.batch(1) == [1, 2]
    assert desk.counters.groups_orphaned_total == 2


@pytest.mark.parametrize("desk", [{"drop_orphaned": True}], indirect=True)
def test_drop_orphaned_takes_them_out_of_the_queue_and_nothing_else(desk):
    give_up_a_version(desk)
    assert desk.batch(1) == [3, 4]
    assert desk.counters.groups_expired_total == 2


@pytest.mark.parametrize("desk", [{"drop_orphaned": True}], indirect=True)
def test_drop_orphaned_leaves_batches_that_were_formed_as_they_are(desk):
    env = desk.register()
    desk.begin()
    desk.publish(1, 1)
    desk.send(env, 1, 2, version=1)
    assert desk.batch(1) == [1, 2]
    desk.begin(resume=True, resume_from_batch=0)
    assert desk.batch(1) == [1, 2]


@pytest.mark.parametrize("desk", [{"require_versions": True}], indirect=True)
def test_require_versions_refuses_the_group_without_and_takes_its_neighbours(desk):
    taken = desk.legacy.take([desk.fields(1, version=3), desk.fields(2), desk.fields(3, version=3)], where="[{index}].")
    assert len(taken.rows) == 2
    assert [(place, error.field) for place, error in taken.refused] == [(1, "[1].policy_versions")]
    with pytest.raises(InvalidGroup, match=r"groups\[0\].policy_versions.*--require-versions"):
        desk.send(desk.register(), 4)


def train(desk, count, batch_size=4):
    env = desk.register()
    desk.begin(batch_size=batch_size)
    desk.send(env, *range(1, count + 1))
    for number in range(1, count + 1):
        desk.batch(number)
    return desk.broker.commit(count)


def test_committed_batches_are_gone(desk):
    train(desk, 3)
    with pytest.raises(CommittedBatch):
        desk.batch(3)
    desk.begin(batch_size=4, resume=True, resume_from_batch=1)
    assert desk.batch(2) is None
    assert desk.broker.state.bodies.size_bytes() == 0


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("desk", [{"keep_batches": 2}], indirect=True)
def test_keep_batches_lets_a_trainer_come_back_to_before_its_last_commit(desk, restarted):
    train(desk, 4)
    assert len(desk.store[0].load().groups) == 2
    if restarted:
        desk.restart()
    with pytest.raises(CommittedBatch):
        desk.batch(4)
    desk.begin(batch_size=4, resume=True, resume_from_batch=2)
    assert [desk.batch(3), desk.batch(4), desk.batch(5)] == [[3], [4], None]


@pytest.mark.parametrize("desk", [{"keep_batches": 1, "key_memory_seconds": 60.0}], indirect=True)
def test_a_kept_batch_is_committed_again_long_after_its_keys_were_forgotten(desk):
    env = desk.register()
    desk.begin(batch_size=4)
    desk.send(env, 1, key="one")
    desk.send(env, 2, key="two")
    desk.batch(1)
    desk.broker.commit(1)
    desk.now += 61
    desk.batch(2)
    desk.broker.commit(2)
    assert desk.send(env, 9, key="one").accepted == 1
    desk.restart()
    desk.begin(batch_size=4, resume=True, resume_from_batch=1)
    assert desk.batch(2) == [2]
    desk.broker.commit(2)


@pytest.mark.parametrize("desk", [{"keep_batches": 1, "key_memory_seconds": 60.0}], indirect=True)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_key_is_not_that_of_a_kept_batch_whose_own_was_forgotten(desk, restarted):
    """Committing the batch again would end the new key, whose group is queued: its repeat would be taken twice."""
    env = desk.register()
    desk.begin(batch_size=4)
    desk.send(env, 1, key="old")
    desk.batch(1)
    desk.broker.commit(1)
    desk.now += 61
    desk.broker.keys.finish([])
    if restarted:
        desk.restart()
    desk.begin(batch_size=4, resume=True, resume_from_batch=0)
    desk.send(env, 2, key="new")
    assert desk.batch(1) == [1]
    desk.broker.commit(1)
    desk.now += 61
    desk.broker.keys.finish([])
    assert desk.send(env, 2, key="new").duplicates == 1


@pytest.mark.parametrize("desk", [{"key_memory_seconds": 60.0}], indirect=True)
def test_a_key_is_remembered_for_its_time_after_its_groups_are_done(desk):
    env = desk.register()
    desk.begin(batch_size=4)
    desk.send(env, 1, key="one")
    desk.send(env, 2, key="two")
    desk.batch(1)
    desk.now += 61
    desk.broker.commit(1)
    assert [desk.send(env, 1, key="one").duplicates, desk.send(env, 2, key="two").duplicates] == [1, 1]
    desk.now += 61
    desk.batch(2)
    desk.broker.commit(2)
    assert [desk.send(env, 2, key="two").duplicates, desk.send(env, 1, key="one").accepted] == [1, 1]


@pytest.mark.parametrize(
    "settings", [{"max_queued_sequences": 11}, {"max_queued_bytes": 1}], ids=["sequences", "bytes"]
)
def test_a_queue_is_bounded_in_sequences_and_in_bytes(desk, settings):
    env = desk.register()
    desk.begin(batch_size=16)
    desk.send(env, 1, 2)
    desk.settings = BrokerSettings(**settings)
    desk.restart()
    with pytest.raises(QueueFull, match="the queue holds 8 sequences"):
        desk.send(env, 3)
    assert desk.broker.state.queue.groups == 2


@pytest.mark.parametrize("desk", [{"max_uncommitted": 2}], indirect=True)
def test_max_uncommitted_bounds_what_is_open_and_a_commit_makes_way(desk):
    env = desk.register()
    desk.begin(batch_size=4)
    desk.send(env, 1, 2, 3)
    assert [desk.batch(1), desk.batch(2)] == [[1], [2]]
    with pytest.raises(BatchOutOfOrder, match=r"at most 2 may be open \(--max-uncommitted\); 2 is the highest"):
        desk.batch(3)
    desk.broker.commit(1)
    assert desk.batch(3) == [3]


@pytest.mark.parametrize("desk", [{"dedup_window_seconds": 5.0}], indirect=True)
@pytest.mark.parametrize(("later", "duplicates"), [(5, 1), (5.1, 0)])
def test_the_dedup_window_is_as_long_as_it_says(desk, later, duplicates):
    desk.legacy.settle(desk.legacy.take([desk.fields(1)]), arrived=False)
    desk.now += later
    assert desk.legacy.take([desk.fields(1)]).duplicates == duplicates


@pytest.mark.parametrize("desk", [{"max_queued_sequences": 8}], indirect=True)
def test_a_repeat_stays_one_when_the_list_it_came_in_did_not_fit(desk):
    desk.legacy.settle(desk.legacy.take([desk.fields(1)]), arrived=False)
    with pytest.raises(Exception, match="the queue holds 4 sequences"):
        desk.legacy.take([desk.fields(1), desk.fields(2), desk.fields(3)])
    taken = desk.legacy.take([desk.fields(1), desk.fields(2)])
    assert (len(taken.rows), taken.duplicates) == (1, 1)


@pytest.mark.parametrize("desk", [{"max_staleness": 1}], indirect=True)
@pytest.mark.parametrize(("step", "served"), [(11, [1, 2]), (12, None)])
def test_groups_at_the_staleness_budget_are_served_and_those_beyond_it_dropped(desk, step, served):
    env = desk.register()
    desk.begin()
    desk.publish(1, 10)
    desk.send(env, 1, 2, version=1)
    desk.publish(2, step)
    assert desk.batch(1) == served
    assert desk.counters.groups_expired_total == (2 if served is None else 0)


def test_a_batch_that_was_never_formed_is_not_committed(desk):
    env = desk.register()
    desk.begin(batch_size=4)
    desk.send(env, 1, 2)
    assert desk.batch(1) == [1]
    with pytest.raises(BatchOutOfOrder, match="the last one formed is 1"):
        desk.broker.commit(2)
    assert desk.batch(2) == [2]


def test_a_run_may_be_stricter_than_the_operator_and_not_laxer(desk):
    env = desk.register(max_batches_offpolicy=9)
    desk.begin(max_staleness=1)
    assert desk.room(env) == 16
    desk.settings = type(desk.settings)(max_staleness=0)
    desk.restart()
    assert desk.room(env) == 8
