"""R10, R11, R12: one run is open, the next one gets nothing of it, and slices have whole groups in any world size."""

import pytest

from atropos_api.errors import InvalidRequest, SupersededRun


def test_two_ranks_keep_their_slices_over_a_resize_of_the_world(broker):
    env = broker.register()
    broker.begin(batch_size=16, world_size=2)
    broker.send(env, 1, 2, 3, 4)
    halves = [broker.batch(1, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(halves[0] + halves[1]) == [1, 2, 3, 4]
    broker.begin(batch_size=16, world_size=3, resume=True)
    thirds = [broker.batch(1, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(ident for third in thirds for ident in third) == [1, 2, 3, 4]
    broker.restart()
    assert [broker.batch(1, rank=rank, world_size=2) for rank in (0, 1)] == halves


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (2, 2), (-1, 2)])
def test_no_rank_outside_its_world_gets_anything(broker, rank, world_size):
    broker.begin()
    with pytest.raises(InvalidRequest, match="not below the world size"):
        broker.batch(1, rank=rank, world_size=world_size)


def test_a_run_resized_on_resume_keeps_the_batches_that_fit_and_the_order_of_the_rest(broker):
    env = broker.register()
    broker.begin(batch_size=8)
    broker.send(env, 1, 2, 3, 4, 5, 6)
    assert [broker.batch(1), broker.batch(2)] == [[1, 2], [3, 4]]
    broker.begin(batch_size=8, resume=True)
    assert sorted(broker.inner.state.batches) == [1, 2]
    broker.begin(batch_size=12, resume=True)
    assert [broker.batch(1), broker.batch(2)] == [[1, 2, 3], [4, 5, 6]]


def test_a_trainer_of_either_contract_supersedes_the_other(broker):
    info = broker.begin()
    broker.leave_trainer_silent()
    broker.register_trainer()
    with pytest.raises(SupersededRun, match="is closed"):
        broker.inner.commit(1, run_id=info.run_id, epoch=info.epoch)
    broker.begin(resume=True)
    assert broker.inner.state.runs.require_open().name == "run"


@pytest.mark.parametrize("change", [{"wandb_group": "x"}, {"wandb_project": "x"}, {"checkpoint_dir": "x"}])
def test_register_with_the_same_names_reconnects_and_with_any_other_begins_anew(broker, change):
    broker.register_trainer(batch_size=4)
    broker.legacy.take([broker.fields(1), broker.fields(2)])
    run, rows = broker.legacy.next_batch()
    broker.legacy.confirm_delivery(run.run_id, 1)
    broker.register_trainer(batch_size=4, num_steps=99)
    again, offered = broker.legacy.next_batch()
    assert (again.run_id, again.num_steps, broker.idents(offered)) == (run.run_id, 99, broker.idents(rows))
    broker.leave_trainer_silent()
    broker.register_trainer(batch_size=4, **change)
    assert broker.legacy.next_batch() is None
    assert sum(map(len, broker.inner.state.left_over.values())) == 2


def test_a_delivery_confirmed_late_commits_nothing_of_another_run(broker):
    broker.register_trainer(batch_size=4)
    broker.legacy.take([broker.fields(1)])
    run, _ = broker.legacy.next_batch()
    broker.leave_trainer_silent()
    broker.register_trainer(batch_size=4, wandb_group="other")
    broker.legacy.take([broker.fields(2)])
    broker.legacy.next_batch()
    broker.legacy.confirm_delivery(run.run_id, 1)
    assert broker.idents(broker.legacy.next_batch()[1]) == [2]


@pytest.mark.parametrize("restarted", [False, True])
def test_only_those_who_took_part_hear_that_a_run_has_finished(broker, restarted):
    early, late = broker.register("early"), broker.register("late")
    first = broker.begin(name="first")
    broker.inner.heartbeat(early)
    second = broker.begin(name="second", num_steps=7)
    broker.inner.heartbeat(late)
    broker.inner.finish_run(second.run_id)
    broker.inner.finish_run(first.run_id)
    if restarted:
        broker.restart()
    new = broker.register("new")
    states = [broker.inner.heartbeat(env).state for env in (early, late, new)]
    assert states == ["finished", "finished", "wait"]
    # It is above the total of its own run, so a legacy environment stops.
    steps = [broker.legacy.status.status_env(env).current_step for env in (early, late, new)]
    assert steps == [1, 8, 0]
    broker.begin(name="third")
    assert [broker.inner.heartbeat(env).state for env in (early, late, new)] == ["run", "run", "run"]


@pytest.mark.parametrize("back_seconds", [0, 3600])
def test_the_newest_run_of_a_name_is_resumed_also_after_the_clock_was_set_back(broker, back_seconds):
    """The newest run's left-over groups and metrics are kept longest as well."""
    broker.begin(name="asked for")
    broker.now += 60 - back_seconds
    broker.restart()
    newest = broker.begin(name="asked for").run_id
    broker.begin(name="other")
    assert [row.name for row in broker.inner.state.runs.all()] == ["asked for", "asked for", "other"]
    assert broker.begin(name="asked for", resume=True).run_id == newest
