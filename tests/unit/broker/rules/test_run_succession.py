"""R10, R11, R12: one run is open, the next one gets nothing of it, and slices are whole groups in any world."""

import pytest

from atropos_api.errors import InvalidRequest, SupersededRun


def test_two_ranks_keep_their_slices_over_a_resize_of_the_world(desk):
    env = desk.register()
    desk.begin(batch_size=16, world_size=2)
    desk.send(env, 1, 2, 3, 4)
    halves = [desk.batch(1, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(halves[0] + halves[1]) == [1, 2, 3, 4]
    desk.begin(batch_size=16, world_size=3, resume=True)
    thirds = [desk.batch(1, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(ident for third in thirds for ident in third) == [1, 2, 3, 4]
    desk.restart()
    assert [desk.batch(1, rank=rank, world_size=2) for rank in (0, 1)] == halves


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (2, 2), (-1, 2)])
def test_no_rank_outside_its_world_gets_anything(desk, rank, world_size):
    desk.begin()
    with pytest.raises(InvalidRequest, match="not below the world size"):
        desk.batch(1, rank=rank, world_size=world_size)


def test_a_run_resized_on_resume_keeps_the_batches_that_fit_and_the_order_of_the_rest(desk):
    env = desk.register()
    desk.begin(batch_size=8)
    desk.send(env, 1, 2, 3, 4, 5, 6)
    assert [desk.batch(1), desk.batch(2)] == [[1, 2], [3, 4]]
    desk.begin(batch_size=8, resume=True)
    assert sorted(desk.broker.state.batches) == [1, 2]
    desk.begin(batch_size=12, resume=True)
    assert [desk.batch(1), desk.batch(2)] == [[1, 2, 3], [4, 5, 6]]


def test_a_trainer_of_either_contract_supersedes_the_other(desk):
    info = desk.begin()
    desk.leave_trainer_silent()
    desk.register_trainer()
    with pytest.raises(SupersededRun, match="is closed"):
        desk.broker.commit(1, run_id=info.run_id, epoch=info.epoch)
    desk.begin(resume=True)
    assert desk.broker.state.runs.require_open().name == "run"


@pytest.mark.parametrize("change", [{"wandb_group": "x"}, {"wandb_project": "x"}, {"checkpoint_dir": "x"}])
def test_register_with_the_same_names_reconnects_and_with_any_other_begins_anew(desk, change):
    desk.register_trainer(batch_size=4)
    desk.legacy.take([desk.fields(1), desk.fields(2)])
    run, rows = desk.legacy.next_batch()
    desk.legacy.confirm_delivery(run.run_id, 1)
    desk.register_trainer(batch_size=4, num_steps=99)
    again, offered = desk.legacy.next_batch()
    assert (again.run_id, again.num_steps, desk.idents(offered)) == (run.run_id, 99, desk.idents(rows))
    desk.leave_trainer_silent()
    desk.register_trainer(batch_size=4, **change)
    assert desk.legacy.next_batch() is None
    assert sum(map(len, desk.broker.state.left_over.values())) == 2


def test_a_delivery_confirmed_late_commits_nothing_of_another_run(desk):
    desk.register_trainer(batch_size=4)
    desk.legacy.take([desk.fields(1)])
    run, _ = desk.legacy.next_batch()
    desk.leave_trainer_silent()
    desk.register_trainer(batch_size=4, wandb_group="other")
    desk.legacy.take([desk.fields(2)])
    desk.legacy.next_batch()
    desk.legacy.confirm_delivery(run.run_id, 1)
    assert desk.idents(desk.legacy.next_batch()[1]) == [2]


@pytest.mark.parametrize("restarted", [False, True])
def test_only_those_who_took_part_hear_that_a_run_has_finished(desk, restarted):
    early, late = desk.register("early"), desk.register("late")
    first = desk.begin(name="first")
    desk.broker.heartbeat(early)
    second = desk.begin(name="second", num_steps=7)
    desk.broker.heartbeat(late)
    desk.broker.finish_run(second.run_id)
    desk.broker.finish_run(first.run_id)
    if restarted:
        desk.restart()
    new = desk.register("new")
    states = [desk.broker.heartbeat(env).state for env in (early, late, new)]
    assert states == ["finished", "finished", "wait"]
    # Above the total of its own run, which is what makes a legacy environment stop.
    steps = [desk.legacy.status.status_env(env).current_step for env in (early, late, new)]
    assert steps == [1, 8, 0]
    desk.begin(name="third")
    assert [desk.broker.heartbeat(env).state for env in (early, late, new)] == ["run", "run", "run"]
