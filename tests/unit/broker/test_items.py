"""Items of an environment's data are leased, come back when their process is followed by another, and are counted."""

import msgspec
import pytest

from atropos_api.broker.status import describe_status
from atropos_api.errors import ItemCallIsOver, UnknownEnvironment, UnknownRun
from atropos_api.store.base import OutcomesRow
from atropos_api.wire import ItemRequest
from atropos_api.wire.messages import ITEM_KEY, item_key


@pytest.fixture
def env(broker):
    broker.begin()
    return broker.register()


def lease(broker, env, count=2, *, process="first", call=1, **settled):
    return broker.inner.lease_items(env, ItemRequest(process=process, call=call, count=count, **settled)).items


def items_of(broker, env):
    return broker.inner.state.environments.get(env).items


def shown(broker, env):
    """Return the environment in the broker's status."""
    return next(row for row in describe_status(broker.inner).environments if row.environment_id == env)


def outcomes_of(broker, env):
    return shown(broker, env).outcomes


def test_numbers_count_from_zero_and_each_is_leased_once(broker, env):
    assert lease(broker, env, 3) == [0, 1, 2]
    assert lease(broker, env, 2, call=2) == [3, 4]


def test_a_process_may_call_for_days(broker, env):
    """A fast task begins a hundred items a second, eight of them at a call: a million calls in a day."""
    request = msgspec.json.decode(b'{"process": "first", "call": 100000000, "count": 1}', type=ItemRequest)
    assert broker.inner.lease_items(env, request).items == [0]


def test_a_repeated_call_gets_the_same_items_and_counts_nothing_twice(broker, env):
    lease(broker, env, 3)
    asked = {"finished": [0, 1], "dropped": {"equal-scores": [2]}, "sampled_sequences": 12, "sampled_tokens": 50}
    assert lease(broker, env, 2, call=2, **asked) == lease(broker, env, 2, call=2, **asked) == [3, 4]
    items = items_of(broker, env)
    assert (items.finished, items.dropped, items.sampled_sequences, items.sampled_tokens) == (
        2,
        {"equal-scores": 1},
        12,
        50,
    )


def test_a_call_before_the_last_one_is_refused(broker, env):
    for call in (1, 2):
        lease(broker, env, call=call)
    with pytest.raises(ItemCallIsOver, match="call 1 is over, the last one was 2"):
        lease(broker, env, call=1)


def test_what_a_killed_process_left_is_leased_first_and_nothing_else_of_it(broker, env):
    lease(broker, env, 4)
    lease(broker, env, 0, call=2, finished=[1], dropped={"timed-out": [2]})
    assert lease(broker, env, 4, process="second") == [0, 3, 4, 5]


def test_leases_survive_the_broker(broker, env):
    lease(broker, env, 4)
    lease(broker, env, 0, call=2, finished=[1])
    broker.restart()
    assert lease(broker, env, 0, call=2, finished=[1]) == []
    assert items_of(broker, env).finished == 1
    assert lease(broker, env, 4, process="second") == [0, 2, 3, 4]


def test_a_number_that_is_not_leased_to_the_process_counts_nothing(broker, env):
    lease(broker, env, 2)
    lease(broker, env, 0, call=2, finished=[0, 0, 1, 7], dropped={"failed": [0, 9]})
    assert (items_of(broker, env).finished, items_of(broker, env).dropped) == (2, {})


def test_no_number_at_the_limit_or_above_is_leased(broker, env):
    assert lease(broker, env, 5, limit=3) == [0, 1, 2]
    assert lease(broker, env, 5, call=2, limit=3) == []
    assert lease(broker, env, 5, process="second", limit=3) == [0, 1, 2]


def test_each_run_begins_with_item_0_and_a_resumed_one_goes_on(broker, env):
    lease(broker, env, 3)
    broker.begin(resume=True)
    assert lease(broker, env, 1, call=2) == [3]
    broker.begin(name="another")
    assert lease(broker, env, 2, call=3) == [0, 1]


@pytest.mark.parametrize("process", ["first", "second"])
def test_a_run_that_is_resumed_after_another_one_goes_on_with_its_items(broker, env, process):
    lease(broker, env, 4)
    lease(broker, env, 0, call=2, finished=[0, 2])
    broker.begin(name="another", take_over=True)
    assert lease(broker, env, 2, call=3) == [0, 1]
    broker.restart()
    broker.register()
    broker.begin(resume=True, take_over=True)
    assert lease(broker, env, 3, call=4, process=process) == [1, 3, 4]
    assert items_of(broker, env).finished == 2


def test_a_restarted_environment_keeps_its_items(broker, env):
    lease(broker, env, 3)
    assert broker.register() == env
    assert lease(broker, env, 2, process="second") == [0, 1]


def test_the_key_of_an_item_that_may_be_used_again_is_remembered_over_a_night(broker, env):
    """The power fails between an item's submission and its report, and the run is resumed the next day."""
    (number,) = lease(broker, env, 1)
    run_id = items_of(broker, env).run_id
    key = item_key(run_id, number, 0)
    broker.send(env, 1, 2, key=key, run_id=run_id)
    broker.batch(1)
    broker.inner.commit(1)
    broker.now += 86_400.0
    broker.restart()
    broker.send(env, 3, 4, key="another")
    broker.batch(2)
    broker.inner.commit(2)
    assert lease(broker, env, 1, process="second") == [number]
    assert broker.send(env, 1, 2, key=key, run_id=run_id).duplicates == 2


def test_a_group_of_a_settled_item_is_a_repeat_however_late_it_comes(broker, env):
    """Its process was stopped for a night, and another one has rolled the item out meanwhile."""
    lease(broker, env, 2)
    run_id = items_of(broker, env).run_id
    keys = [item_key(run_id, number, 0) for number in range(4)]
    assert lease(broker, env, 2, process="second") == [0, 1]
    broker.send(env, 1, 2, key=keys[0], run_id=run_id)
    lease(broker, env, 0, process="second", call=2, finished=[0], dropped={"timed-out": [1]})
    broker.batch(1)
    broker.inner.commit(1)
    broker.now += 86_400.0
    broker.send(env, 3, 4, key="another")
    broker.batch(2)
    broker.inner.commit(2)
    assert broker.inner.keys.find("env", keys[0]) is None, "a settled item's key is forgotten like any other"
    assert [broker.send(env, 5, key=key, run_id=run_id).duplicates for key in keys] == [1, 1, 0, 0]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_after_a_restart_of_the_broker_each_process_gets_its_own_environment_and_items_back(broker, order):
    """Keys are of an environment's name: with names exchanged, a group would be a repeat of the other's."""
    own = {"a": broker.register(process="a")}
    with broker.inner.state.environments.waiting("a"):
        own["b"] = broker.register(process="b")
    assert own["a"] != own["b"]
    broker.restart()
    assert {process: broker.register(process=process) for process in order} == own
    assert broker.register(process="c") == own["a"], "a successor has the first name of those that do not wait"


@pytest.mark.parametrize("key", ["", "anything", "r/item-5", "r/item--5/0", "r/item-5/0/1", "item-5/0", "r/item-٥/x"])
def test_other_keys_are_no_items(key):
    assert ITEM_KEY.fullmatch(key) is None
    found = ITEM_KEY.fullmatch(item_key("a/b", 5, 1))
    assert (found["run_id"], found["number"]) == ("a/b", "5")


def test_without_a_run_none_are_leased_and_after_its_end_they_are_still_settled(broker):
    env = broker.register()
    assert lease(broker, env) == []
    info = broker.begin()
    lease(broker, env, 2)
    broker.inner.finish_run(info.run_id, epoch=info.epoch)
    assert lease(broker, env, 2, call=2, finished=[0]) == []
    assert items_of(broker, env).finished == 1


def test_an_unknown_environment_is_named(broker):
    with pytest.raises(UnknownEnvironment, match="no environment has the id 7"):
        lease(broker, 7)


def test_groups_of_committed_batches_are_counted_as_trained_over_a_restart(broker, env):
    broker.send(env, 1, 2, 3, key="a")
    broker.batch(1)
    broker.inner.commit(1)
    broker.restart()
    assert outcomes_of(broker, env) == {"trained": 2}


def test_a_batch_that_is_trained_again_after_a_resume_counts_once(request, broker):
    broker.settings = type(broker.settings)(keep_batches=5)
    broker.restart()
    broker.begin()
    env = broker.register()
    broker.send(env, 1, 2, 3, 4, key="a")
    for number in (1, 2):
        broker.batch(number)
    broker.inner.commit(2)
    broker.begin(resume=True, resume_from_batch=1)
    assert outcomes_of(broker, env) == {"trained": 2}
    broker.batch(2)
    broker.inner.commit(2)
    assert outcomes_of(broker, env) == {"trained": 4}


def test_groups_that_the_broker_drops_are_counted_by_reason_and_over_a_restart(broker):
    broker.begin(max_staleness=1)
    env = broker.register()
    broker.publish(1, 0)
    broker.send(env, 1, version=1)
    broker.publish(2, 5)
    broker.restart()
    assert outcomes_of(broker, env) == {"too-old": 1}


def test_counts_are_of_one_run(broker, env):
    broker.send(env, 1, 2)
    broker.batch(1)
    broker.inner.commit(1)
    broker.begin(name="another")
    broker.send(env, 3, 4)
    broker.batch(1)
    broker.inner.commit(1)
    assert outcomes_of(broker, env) == {"trained": 2}


def train(broker, env, *idents):
    """Train a batch of two groups in the open run."""
    number = broker.info.next_batch
    broker.send(env, *idents)
    broker.batch(number)
    broker.inner.commit(number)


def test_a_run_begins_without_the_counts_of_the_one_before(broker, env):
    lease(broker, env)
    train(broker, env, 1, 2)
    broker.begin(name="another")
    assert (shown(broker, env).items, outcomes_of(broker, env)) == (None, {})


@pytest.mark.parametrize("broker", [{"keep_batches": 5}], indirect=True)
@pytest.mark.parametrize(("point", "trained"), [(1, 2), (0, 0)])
def test_a_run_that_is_resumed_after_another_goes_on_with_its_counts(broker, env, point, trained):
    first = lease(broker, env)
    train(broker, env, 1, 2)
    broker.begin(name="another")
    lease(broker, env, 3)
    train(broker, env, 3, 4)
    broker.restart()
    broker.begin(resume=True, resume_from_batch=point)
    assert (shown(broker, env).items.drawn, outcomes_of(broker, env)) == (len(first), {"trained": trained})


@pytest.mark.parametrize("broker", [{"keep_batches": 5}], indirect=True)
def test_the_counts_of_a_run_that_were_forgotten_do_not_fall_below_zero(broker, env):
    train(broker, env, 1, 2)
    broker.begin(name="another")
    broker.inner.state.environments.get(env).outcomes = OutcomesRow()
    broker.begin(resume=True, resume_from_batch=0)
    assert outcomes_of(broker, env) == {"trained": 0}


def test_a_group_that_is_meant_for_an_ended_run_is_left_over_of_it_and_never_trained_in_the_next(broker, env):
    first = broker.info.run_id
    broker.begin(name="another")
    broker.send(env, 1, key="a", run_id=first)
    broker.send(env, 2, 3, key="b", run_id=broker.info.run_id)
    assert broker.batch(1) == [2, 3]
    assert [len(groups) for run_id, groups in broker.inner.state.left_over.items() if run_id == first] == [1]


def test_a_group_that_is_meant_for_an_unknown_run_is_refused_whole(broker, env):
    with pytest.raises(UnknownRun):
        broker.send(env, 1, 2, key="a", run_id="run-nowhere")
    assert broker.inner.state.queue.groups == 0
    broker.send(env, 1, 2, key="a")
    assert broker.inner.state.queue.groups == 2, "the key was not used up"


def test_groups_of_an_earlier_run_that_are_lost_leave_the_counts_of_this_run_alone(broker, env):
    broker.send(env, 1)
    earlier = broker.info.run_id
    broker.begin(name="next")
    broker.send(env, 2, 3)
    broker.batch(1)
    broker.inner.commit(1)
    broker.store[1].discard([row.body for row in broker.inner.state.left_over[earlier]])
    broker.restart()
    assert earlier not in broker.inner.state.left_over or not broker.inner.state.left_over[earlier]
    assert outcomes_of(broker, env) == {"trained": 2}
