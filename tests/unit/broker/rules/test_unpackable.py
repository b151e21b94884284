"""R14: groups that no batch can ever hold are counted, shown, never throttle anyone, and go with their run."""

from atropos_api.broker.status import describe_status


def shown(desk):
    queue = describe_status(desk.broker)["queue"]
    return queue["unpackable_sizes"], queue["unpackable_groups"]


def test_they_are_counted_on_arrival_and_shown_while_they_wait(desk):
    env = desk.register()
    desk.begin(batch_size=8)
    desk.send(env, 1, size=9)
    desk.send(env, 2)
    assert shown(desk) == ([9], 1)
    assert desk.counters.groups_unpackable_total == 1
    assert desk.broker.heartbeat(env).outstanding_sequences == 4


def test_a_size_that_completes_others_makes_them_packable(desk):
    env, fives = desk.register(), desk.register("fives", 5)
    desk.begin(batch_size=8)
    desk.broker.disconnect_environment(fives)
    desk.send(env, 1, size=3)
    assert shown(desk) == ([3], 1)
    desk.broker.heartbeat(fives)
    assert shown(desk) == ([], 0)


def test_they_are_dropped_when_their_run_finishes_and_the_rest_is_left_over(desk):
    env = desk.register()
    info = desk.begin(batch_size=8)
    desk.send(env, 1, size=9, key="nine")
    desk.send(env, 2, key="four")
    desk.broker.finish_run(info.run_id)
    assert [row.size for row in desk.broker.state.left_over[info.run_id]] == [4]
    assert [row.size for row in desk.store[0].load().groups] == [4]
    assert desk.broker.state.bodies.size_bytes() == desk.broker.state.left_over[info.run_id][0].body.length
    assert [event.type for event in desk.broker.state.events.after(0)].count("unpackable-dropped") == 1


def test_a_superseded_run_keeps_them_for_a_trainer_with_larger_batches(desk):
    env = desk.register()
    desk.begin(batch_size=8)
    desk.send(env, 1, size=9)
    desk.begin(name="other")
    desk.begin(resume=True, batch_size=9)
    assert desk.batch(1) == [1]


def test_a_run_of_the_atropos_contract_drops_them_with_its_end(desk):
    desk.register_trainer(batch_size=8)
    desk.legacy.take([desk.fields(1, 9, env_id=None), desk.fields(2, 4, env_id=None)])
    desk.leave_trainer_silent()
    desk.register_trainer(batch_size=8, wandb_group="other")
    assert [row.size for rows in desk.broker.state.left_over.values() for row in rows] == [4]
