"""R10a: a trainer at work keeps its run; the same command begins a new run only after the old one has ended."""

import pytest

from atropos_api.client import BrokerRefused, RunSuperseded


def test_the_same_command_on_the_second_day_is_a_new_run(scene):
    scene.register(batch_size=4, num_steps=2)
    assert [scene.post(ident)["status"] for ident in (1, 2, 3)] == ["received"] * 3
    assert [scene.poll(), scene.poll()] == [[1], [2]]
    first = scene.open_run()
    assert scene.register(batch_size=4, num_steps=2).status_code == 200
    assert scene.open_run() != first
    assert scene.poll() is None
    scene.post(4)
    assert scene.poll() == [4]


def test_over_is_over_for_a_broker_that_was_restarted_meanwhile(scene):
    scene.register(batch_size=4, num_steps=1)
    scene.post(1)
    assert scene.poll() == [1]
    scene.restart()
    scene.register(batch_size=4, num_steps=1)
    assert scene.poll() is None


def test_a_run_that_is_not_over_goes_on_with_its_batch_in_hand_and_the_new_size(scene):
    scene.register(batch_size=4)
    for ident in (1, 2, 3, 4):
        scene.post(ident)
    assert scene.poll() == [1]
    first = scene.open_run()
    scene.register(batch_size=4)
    assert scene.poll() == [1]
    scene.register(batch_size=8)
    assert (scene.open_run(), scene.poll(), scene.poll()) == (first, [1, 2], [3, 4])


@pytest.mark.parametrize(("silence", "goes_on"), [(899, True), (901, False)])
def test_a_trainer_that_has_long_gone_begins_anew_under_the_same_names(scene, silence, goes_on):
    scene.register(batch_size=4)
    scene.post(1)
    assert scene.poll() == [1]
    scene.now += silence
    scene.register(batch_size=4)
    assert scene.poll() == ([1] if goes_on else None)
    assert scene.client.status()["left_over_groups"] == {} if goes_on else {scene.open_run(): 1}


@pytest.mark.parametrize("change", [{"wandb_group": "x"}, {"wandb_project": "x"}, {"checkpoint_dir": "x"}])
def test_a_second_trainer_by_accident_is_refused_and_told_the_ways_out(scene, change):
    scene.register()
    scene.poll()
    run_id = scene.open_run()
    scene.now += 4
    answer = scene.register(**change)
    assert answer.status_code == 409
    detail = answer.json()["detail"]
    assert f"run group ({run_id}) is open and its trainer asked 4 s ago" in detail
    for way_out in ("silent for 30 s", f"/v1/runs/{run_id}/finish", "/reset_data", "--take-over", "--fresh"):
        assert way_out in detail
    assert scene.open_run() == run_id
    scene.now += 27
    assert scene.register(**change).status_code == 200
    assert scene.open_run() != run_id


def test_a_trainer_that_trains_for_long_is_at_work_for_three_times_as_long(scene):
    scene.register(batch_size=4)
    for ident in (1, 2, 3):
        scene.post(ident)
    scene.poll()
    scene.now += 100
    scene.poll()
    scene.now += 299
    assert scene.register(wandb_group="other").status_code == 409
    scene.now += 2
    assert scene.register(wandb_group="other").status_code == 200


@pytest.mark.parametrize(("away", "status"), [(5, 409), (600, 409), (1000, 200)])
def test_a_broker_that_was_away_could_not_hear_the_trainer(scene, away, status):
    scene.register()
    scene.poll()
    scene.now += away
    scene.restart()
    assert scene.register(wandb_group="other").status_code == status


def test_what_asks_without_a_name_does_not_wake_a_trainer_that_has_gone(scene):
    """axolotl polls for batches from a thread before it registers, and would block its own registration."""
    scene.register()
    scene.now += 1000
    scene.poll()
    assert scene.register(wandb_group="other").status_code == 200


def test_a_reset_ends_the_run_of_any_trainer_at_work(scene, caplog):
    scene.register()
    scene.poll()
    scene.now += 3
    assert scene.http.get("/reset_data").text == "Reset successful"
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert line.getMessage().startswith("run group (run-")
    assert line.getMessage().endswith("was ended by GET /reset_data; its trainer asked 3 s ago")
    assert scene.register(wandb_group="other").status_code == 200


def test_v1_refuses_another_name_over_a_live_run_unless_it_takes_over(scene):
    first = scene.begin("first")
    scene.now += 4
    for options in ({}, {"resume": True}):
        with pytest.raises(BrokerRefused, match=r"409.*run first .* its trainer asked 4 s ago") as caught:
            scene.begin("second", **options)
        assert caught.value.kind == "run-in-progress"
    assert scene.open_run() == first.run_id
    second = scene.begin("second", take_over=True)
    assert scene.open_run() == second.run_id
    with pytest.raises(RunSuperseded):
        scene.client.get_batch(1, run_id=first.run_id, epoch=first.epoch)


@pytest.mark.parametrize("resume", [False, True])
def test_v1_takes_the_same_name_for_the_same_trainer(scene, resume):
    first = scene.begin()
    assert (scene.begin(resume=resume).run_id == first.run_id) is resume


@pytest.mark.parametrize("sign", ["batch", "commit", "policy"])
def test_each_call_of_a_v1_trainer_is_a_sign_of_life(scene, sign):
    env = scene.register_v1().environment_id
    run = scene.begin("first", batch_size=4)
    scene.send(env, 1)
    scene.batch(1)
    scene.now += 20
    {
        "batch": lambda: scene.batch(1),
        "commit": lambda: scene.client.commit(1, run_id=run.run_id, epoch=run.epoch),
        "policy": lambda: scene.client.get_policy(run_id=run.run_id, epoch=run.epoch),
    }[sign]()
    scene.now += 20
    with pytest.raises(BrokerRefused, match="run first"):
        scene.begin("second")


def test_watchers_are_not_a_sign_of_life(scene):
    scene.begin("first")
    scene.now += 31
    scene.client.status()
    scene.client.get_policy()
    scene.http.get("/status")
    scene.begin("second")


def test_neither_contract_closes_the_live_run_of_the_other(scene):
    scene.begin("group")
    assert scene.register().status_code == 409
    scene.client.finish_run(scene.run.run_id, epoch=scene.run.epoch)
    assert scene.register().status_code == 200
    with pytest.raises(BrokerRefused, match="run group"):
        scene.begin("group")
    scene.begin("group", take_over=True)


def test_the_log_tells_how_runs_follow_one_another(scene, caplog):
    caplog.set_level("INFO", logger="atropos_api.broker")

    def told():
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("atropos_api.broker")]
        caplog.clear()
        return lines

    scene.register(batch_size=4)
    assert [line.partition(") ")[2] for line in told()] == ["begun: batches of 4 sequences, 10 steps"]
    scene.post(1)
    scene.register(batch_size=4)
    (line,) = told()
    assert line.endswith("its trainer registered again, 0 s after it was last heard of; batch 1 is next")
    scene.begin("next", take_over=True)
    first, second = told()
    assert first.startswith("run next (run-")
    assert second.startswith("run group (run-")
    assert second.endswith("closed for it after batch 0, 1 groups are left over")
    scene.begin("next", resume=True)
    assert [line.partition(") ")[2] for line in told()] == ["taken over: epoch 2, from batch 1 on"]
    scene.client.finish_run(scene.run.run_id, epoch=scene.run.epoch)
    assert [line.partition(") ")[2] for line in told()] == ["finished after batch 0, 0 groups are left over"]
