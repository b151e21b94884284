"""Each option of the operator has its documented effect."""

import pytest

from atropos_api.broker import BrokerSettings
from atropos_api.broker.status import describe_status
from atropos_api.errors import BatchOutOfOrder, CommittedBatch, InvalidGroup, QueueFull


def give_up_a_version(broker):
    """Resume the run from a checkpoint that is older than its published version 2."""
    env = broker.register()
    broker.begin()
    broker.publish(1, 0)
    broker.publish(2, 1)
    broker.send(env, 1, 2, version=2)
    broker.send(env, 3, 4, version=1)
    broker.begin(resume=True, resume_from_batch=0)
    broker.publish(3, 0)


def test_orphaned_groups_are_trained_and_counted(broker):
    give_up_a_version(broker)
    assert broker.batch(1) == [1, 2]
    assert broker.counters.groups_orphaned_total == 2


@pytest.mark.parametrize("broker", [{"drop_orphaned": True}], indirect=True)
def test_drop_orphaned_takes_them_out_of_the_queue_and_nothing_else(broker):
    give_up_a_version(broker)
    assert broker.batch(1) == [3, 4]
    assert broker.counters.groups_expired_total == 2


@pytest.mark.parametrize("broker", [{"drop_orphaned": True}], indirect=True)
def test_drop_orphaned_leaves_batches_that_were_formed_as_they_are(broker):
    env = broker.register()
    broker.begin()
    broker.publish(1, 1)
    broker.send(env, 1, 2, version=1)
    assert broker.batch(1) == [1, 2]
    broker.begin(resume=True, resume_from_batch=0)
    assert broker.batch(1) == [1, 2]


@pytest.mark.parametrize("broker", [{"require_versions": True}], indirect=True)
def test_require_versions_refuses_the_group_without_and_takes_its_neighbours(broker):
    taken = broker.legacy.take(
        [broker.fields(1, version=3), broker.fields(2), broker.fields(3, version=3)], where="[{index}]."
    )
    assert len(taken.rows) == 2
    assert [(place, error.field) for place, error in taken.refused] == [(1, "[1].policy_versions")]
    with pytest.raises(InvalidGroup, match=r"groups\[0\].policy_versions.*--require-versions"):
        broker.send(broker.register(), 4)


@pytest.mark.parametrize("broker", [{"max_queued_sequences": 4}], indirect=True)
def test_a_group_of_no_registered_environment_is_counted_once_however_often_a_full_queue_refuses_it(broker):
    broker.register_trainer(batch_size=4)
    broker.legacy.take([broker.fields(1)])
    for _ in range(3):
        with pytest.raises(QueueFull):
            broker.legacy.take([broker.fields(2)])
    assert broker.counters.groups_unregistered_total == 1


def train(broker, count, batch_size=4):
    env = broker.register()
    broker.begin(batch_size=batch_size)
    broker.send(env, *range(1, count + 1))
    for number in range(1, count + 1):
        broker.batch(number)
    return broker.inner.commit(count)


@pytest.mark.parametrize("broker", [{"recent_bytes": 0}, {"recent_bytes": 10}], indirect=True)
def test_of_batches_that_are_not_kept_for_the_page_nothing_stays_in_memory(broker):
    train(broker, 3)
    assert list(broker.inner.recent) == []


def test_committed_batches_are_gone(broker):
    train(broker, 3)
    with pytest.raises(CommittedBatch):
        broker.batch(3)
    broker.begin(batch_size=4, resume=True, resume_from_batch=1)
    assert broker.batch(2) is None
    assert broker.inner.state.bodies.size_bytes() == 0


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("broker", [{"keep_batches": 2}], indirect=True)
def test_keep_batches_lets_a_trainer_come_back_to_before_its_last_commit(broker, restarted):
    train(broker, 4)
    assert len(broker.store[0].load().groups) == 2
    if restarted:
        broker.restart()
    with pytest.raises(CommittedBatch):
        broker.batch(4)
    broker.begin(batch_size=4, resume=True, resume_from_batch=2)
    assert [broker.batch(3), broker.batch(4), broker.batch(5)] == [[3], [4], None]


@pytest.mark.parametrize("broker", [{"keep_batches": 1, "key_memory_seconds": 60.0}], indirect=True)
def test_a_kept_batch_is_committed_again_long_after_its_keys_were_forgotten(broker):
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, key="one")
    broker.send(env, 2, key="two")
    broker.batch(1)
    broker.inner.commit(1)
    broker.now += 61
    broker.batch(2)
    broker.inner.commit(2)
    assert broker.send(env, 9, key="one").accepted == 1
    broker.restart()
    broker.begin(batch_size=4, resume=True, resume_from_batch=1)
    assert broker.batch(2) == [2]
    broker.inner.commit(2)


@pytest.mark.parametrize("broker", [{"keep_batches": 1, "key_memory_seconds": 60.0}], indirect=True)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_key_is_not_that_of_a_kept_batch_whose_own_was_forgotten(broker, restarted):
    """Committing the batch again would forget the new key, whose group is queued: its repeat would be taken twice."""
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, key="old")
    broker.batch(1)
    broker.inner.commit(1)
    broker.now += 61
    broker.inner.keys.finish([])
    if restarted:
        broker.restart()
    broker.begin(batch_size=4, resume=True, resume_from_batch=0)
    broker.send(env, 2, key="new")
    assert broker.batch(1) == [1]
    broker.inner.commit(1)
    broker.now += 61
    broker.inner.keys.finish([])
    assert broker.send(env, 2, key="new").duplicates == 1


@pytest.mark.parametrize("broker", [{"key_memory_seconds": 60.0}], indirect=True)
def test_a_key_is_remembered_for_its_time_after_its_groups_are_done(broker):
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, key="one")
    broker.send(env, 2, key="two")
    broker.batch(1)
    broker.now += 61
    broker.inner.commit(1)
    assert [broker.send(env, 1, key="one").duplicates, broker.send(env, 2, key="two").duplicates] == [1, 1]
    broker.now += 61
    broker.batch(2)
    broker.inner.commit(2)
    assert [broker.send(env, 2, key="two").duplicates, broker.send(env, 1, key="one").accepted] == [1, 1]


@pytest.mark.parametrize("broker", [{"key_memory_seconds": 60.0}], indirect=True)
def test_a_key_ages_from_the_start_if_the_clock_was_set_back_while_the_broker_was_down(broker):
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, key="one")
    broker.batch(1)
    broker.inner.commit(1)
    broker.now -= 86_400
    broker.restart()
    broker.now += 59
    broker.inner.keys.finish([])
    assert broker.inner.keys.find("env", "one") is not None
    broker.now += 1
    broker.inner.keys.finish([])
    assert broker.inner.keys.find("env", "one") is None, "it would be kept for a day"


@pytest.mark.parametrize(
    "settings", [{"max_queued_sequences": 11}, {"max_queued_bytes": 1}], ids=["sequences", "bytes"]
)
def test_a_queue_is_bounded_in_sequences_and_in_bytes(broker, settings):
    env = broker.register()
    broker.begin(batch_size=16)
    broker.send(env, 1, 2)
    broker.settings = BrokerSettings(**settings)
    broker.restart()
    with pytest.raises(QueueFull, match="the queue holds 8 sequences"):
        broker.send(env, 3)
    assert broker.inner.state.queue.groups == 2


@pytest.mark.parametrize("broker", [{"max_uncommitted": 2}], indirect=True)
def test_max_uncommitted_bounds_what_is_open_and_a_commit_makes_way(broker):
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, 2, 3)
    assert [broker.batch(1), broker.batch(2)] == [[1], [2]]
    with pytest.raises(BatchOutOfOrder, match=r"at most 2 may be open \(--max-uncommitted\); 2 is the highest"):
        broker.batch(3)
    broker.inner.commit(1)
    assert broker.batch(3) == [3]


@pytest.mark.parametrize("broker", [{"dedup_window": 5.0}], indirect=True)
@pytest.mark.parametrize(("later", "duplicates"), [(5, 1), (5.1, 0)])
def test_the_dedup_window_is_as_long_as_it_says(broker, later, duplicates):
    broker.legacy.settle(broker.legacy.take([broker.fields(1)]), arrived=False)
    broker.now += later
    assert broker.legacy.take([broker.fields(1)]).duplicates == duplicates


@pytest.mark.parametrize("broker", [{"max_queued_sequences": 8}], indirect=True)
def test_a_repeat_stays_one_when_the_list_it_came_in_did_not_fit(broker):
    broker.legacy.settle(broker.legacy.take([broker.fields(1)]), arrived=False)
    with pytest.raises(Exception, match="the queue holds 4 sequences"):
        broker.legacy.take([broker.fields(1), broker.fields(2), broker.fields(3)])
    taken = broker.legacy.take([broker.fields(1), broker.fields(2)])
    assert (len(taken.rows), taken.duplicates) == (1, 1)


@pytest.mark.parametrize("broker", [{"max_staleness": 1}], indirect=True)
@pytest.mark.parametrize(("step", "served"), [(11, [1, 2]), (12, None)])
def test_groups_at_the_staleness_budget_are_served_and_those_beyond_it_dropped(broker, step, served):
    env = broker.register()
    broker.begin()
    broker.publish(1, 10)
    broker.send(env, 1, 2, version=1)
    broker.publish(2, step)
    assert broker.batch(1) == served
    assert broker.counters.groups_expired_total == (2 if served is None else 0)


def test_a_batch_that_was_never_formed_is_not_committed(broker):
    env = broker.register()
    broker.begin(batch_size=4)
    broker.send(env, 1, 2)
    assert broker.batch(1) == [1]
    with pytest.raises(BatchOutOfOrder, match="the last one formed is 1"):
        broker.inner.commit(2)
    assert broker.batch(2) == [2]


def test_a_run_may_be_stricter_than_the_operator_and_not_laxer(broker):
    env = broker.register(max_batches_offpolicy=9)
    broker.begin(max_staleness=1)
    assert broker.room(env) == 16
    broker.settings = type(broker.settings)(max_staleness=0)
    broker.restart()
    assert broker.room(env) == 8


def test_any_number_of_ranks_may_share_a_batch(broker):
    env = broker.register()
    broker.begin()
    broker.send(env, 1, 2)
    shares = [broker.batch(1, rank=rank, world_size=10**18 - 1) for rank in (0, 1, 2, 10**18 - 2)]
    assert shares == [[1], [2], [], []]


def test_no_group_is_younger_than_nothing_after_the_clock_was_set_back_while_the_broker_was_down(broker):
    broker.begin()
    broker.send(broker.register(), 1)
    broker.now -= 3600
    broker.restart()
    assert describe_status(broker.inner).queue.oldest_age_seconds == 0.0
