"""R14: groups that fit no batch are counted and shown, do not throttle environments, and end with their run."""

from atropos_api.broker.status import describe_status


def shown(broker):
    queue = describe_status(broker.inner).queue
    return queue.unpackable_sizes, queue.unpackable_groups


def test_they_are_counted_on_arrival_and_shown_while_they_wait(broker):
    env = broker.register()
    broker.begin(batch_size=8)
    broker.send(env, 1, size=9)
    broker.send(env, 2)
    assert shown(broker) == ([9], 1)
    assert broker.counters.groups_unpackable_total == 1
    assert broker.inner.heartbeat(env).outstanding_sequences == 4


def test_a_size_that_completes_others_makes_them_packable(broker):
    env, fives = broker.register(), broker.register("fives", 5)
    broker.begin(batch_size=8)
    broker.inner.disconnect_environment(fives)
    broker.send(env, 1, size=3)
    assert shown(broker) == ([3], 1)
    broker.inner.heartbeat(fives)
    assert shown(broker) == ([], 0)


def test_they_are_dropped_when_their_run_finishes_and_the_rest_is_left_over(broker):
    env = broker.register()
    info = broker.begin(batch_size=8)
    broker.send(env, 1, size=9, key="nine")
    broker.send(env, 2, key="four")
    broker.inner.finish_run(info.run_id)
    assert [row.size for row in broker.inner.state.left_over[info.run_id]] == [4]
    assert [row.size for row in broker.store[0].load().groups] == [4]
    assert broker.inner.state.bodies.size_bytes() == broker.inner.state.left_over[info.run_id][0].body.length
    assert [event.type for event in broker.inner.state.events.after(0)].count("unpackable-dropped") == 1


def test_a_superseded_run_keeps_them_for_a_trainer_with_larger_batches(broker):
    env = broker.register()
    broker.begin(batch_size=8)
    broker.send(env, 1, size=9)
    broker.begin(name="other")
    broker.begin(resume=True, batch_size=9)
    assert broker.batch(1) == [1]


def test_a_run_of_the_atropos_contract_drops_them_with_its_end(broker):
    broker.register_trainer(batch_size=8)
    broker.legacy.take([broker.fields(1, 9, env_id=None), broker.fields(2, 4, env_id=None)])
    broker.leave_trainer_silent()
    broker.register_trainer(batch_size=8, wandb_group="other")
    assert [row.size for rows in broker.inner.state.left_over.values() for row in rows] == [4]
