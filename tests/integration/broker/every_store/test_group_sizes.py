"""R14a: group sizes are checked together, environments that do not fit are paused, and no group is lost silently."""

import pytest

from atropos_api.client import BrokerRefused

ALONE = "groups of 5 alone never fill 8 sequences; an environment with groups of 3 would complete them, or a batch size"


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def start_v0(scene, **changes):
    scene.register(**changes)
    assert scene.poll() is None


def status_of(answer):
    assert answer.status_code == 200
    return answer.json()["status"]


def test_v0_sizes_that_fit_only_together_wait_for_each_other(scene, caplog):
    start_v0(scene)
    for _ in range(3):
        status = status_of(scene.register_env("fives", 5))
        scene.now += 1
    assert status.startswith(f"wait: {ALONE} of 5 or 10")
    (line,) = warnings_of(caplog)
    assert line.startswith(f"environment fives waits in run group: {ALONE}")
    threes = scene.register_env("threes", 3).json()
    fives = scene.register_env("fives", 5).json()
    assert (threes["status"], fives["status"]) == ("success", "success")
    scene.post(1, 5, fives["env_id"])
    scene.post(2, 3, threes["env_id"])
    assert scene.poll() == [1, 2]


def test_v0_one_that_stopped_asking_is_not_a_partner(scene):
    start_v0(scene)
    scene.register_env("fives", 5)
    scene.now += 11
    assert status_of(scene.register_env("threes", 3)).startswith("wait: groups of 3 alone never fill 8")


def test_v1_sizes_that_fit_only_together_have_room_once_both_are_there(scene, caplog):
    scene.begin()
    fives = scene.register_v1("fives", 5)
    assert fives.pacing.room_sequences == 0
    assert fives.pacing.paused_because.startswith(ALONE)
    assert [line.partition(": ")[2].startswith(ALONE) for line in warnings_of(caplog)] == [True]
    threes = scene.register_v1("threes", 3)
    assert (threes.pacing.paused_because, threes.pacing.room_sequences > 0) == (None, True)
    woken = scene.client.heartbeat(fives.environment_id, revision=fives.pacing.revision, wait_seconds=5)
    assert (woken.paused_because, woken.room_sequences > 0) == (None, True)
    for form in ("json", "columns"):
        assert scene.send(fives.environment_id, 1, size=5, form=form).buffered == 0
        assert scene.send(threes.environment_id, 2, size=3, form=form).buffered == 0
    assert [scene.batch(1), scene.batch(2)] == [[1, 2], [1, 2]]


def test_an_environment_of_one_contract_completes_that_of_the_other(scene):
    start_v0(scene)
    scene.register_v1("threes", 3)
    assert status_of(scene.register_env("fives", 5)) == "success"


def test_only_a_size_above_the_batch_is_refused(scene):
    start_v0(scene)
    answer = scene.register_env("nines", 9)
    assert answer.status_code == 422
    assert "groups of 9 are larger than a batch of 8 sequences" in answer.json()["detail"][0]["msg"]
    with pytest.raises(BrokerRefused, match="groups of 9 are larger") as caught:
        scene.register_v1("nines", 9)
    assert caught.value.kind == "group-size-cannot-fill-batch"


def test_v0_a_size_that_no_longer_fits_is_buffered_paused_and_reported_once(scene, caplog):
    start_v0(scene, batch_size=16)
    env_id = scene.register_env("eights", 8).json()["env_id"]
    assert scene.post(1, 8, env_id) == {"status": "received"}
    assert scene.http.get(f"/status-env?env_id={env_id}").json()["queue_size"] == 1
    scene.register(batch_size=12)
    for ident in (2, 3):
        assert scene.post(ident, 8, env_id)["status"] == "buffered"
    answer = scene.http.get(f"/status-env?env_id={env_id}").json()
    # Atropos' own rules: pause at three batches; end when step and queue together exceed the run's last step.
    assert answer["queue_size"] * 8 >= 3 * 12
    assert answer["current_step"] + answer["queue_size"] * 8 // 12 <= 10
    (line,) = warnings_of(caplog)
    assert line.startswith("environment eights_0 waits in run group: groups of 8 alone never fill 12 sequences")
    scene.register(batch_size=8)
    assert scene.post(4, 8, env_id) == {"status": "received"}
    assert [scene.poll() for _ in range(4)] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("form", ["json", "columns"])
def test_v1_a_size_that_no_longer_fits_is_buffered_paused_and_reported_once(scene, caplog, form):
    scene.begin(batch_size=16)
    env_id = scene.register_v1("eights", 8).environment_id
    assert scene.send(env_id, 1, size=8, form=form).buffered == 0
    scene.begin(batch_size=12, resume=True)
    for ident in (2, 3):
        answer = scene.send(env_id, ident, size=8, form=form)
        assert (answer.accepted, answer.buffered, answer.pacing.room_sequences) == (1, 1, 0)
        assert answer.pacing.paused_because.startswith("groups of 8 alone never fill 12 sequences")
    assert len(warnings_of(caplog)) == 1
    scene.restart()
    assert scene.client.heartbeat(env_id).paused_because is not None
    assert scene.batch(1) is None
    scene.begin(batch_size=24, resume=True)
    assert scene.batch(1, form) == [1, 2, 3]


def test_an_environment_whose_partner_left_pauses_until_it_is_back(scene, caplog):
    scene.begin()
    fives, threes = scene.register_v1("fives", 5), scene.register_v1("threes", 3)
    caplog.clear()
    scene.http.post("/disconnect-env", json={"env_id": threes.environment_id})
    assert scene.client.heartbeat(fives.environment_id).paused_because is not None
    assert len(warnings_of(caplog)) == 1
    scene.client.heartbeat(threes.environment_id)
    assert scene.client.heartbeat(fives.environment_id).paused_because is None


@pytest.mark.parametrize(("size", "status"), [(1, "received"), (2, "received"), (3, "buffered"), (9, "buffered")])
@pytest.mark.parametrize("env_id", [None, 77])
def test_the_size_of_who_never_registered_counts_as_one_that_keeps_coming(scene, env_id, size, status):
    start_v0(scene)
    assert scene.post(1, size, env_id)["status"] == status
    assert scene.http.post("/scored_data_list", json=[body(size, env_id)]).json().get("buffered", 0) == (
        status == "buffered"
    )


def body(size, env_id):
    return {"tokens": [[1]] * size, "masks": [[1]] * size, "scores": [0.0] * size, "env_id": env_id}


def test_where_groups_are_counted_every_size_fits(scene):
    scene.begin(batch_size=2, unit="groups")
    env = scene.register_v1("sevens", 7)
    assert (env.pacing.paused_because, env.pacing.room_sequences > 0) == (None, True)
    assert scene.send(env.environment_id, 1, 2, size=7).buffered == 0
    assert scene.batch(1) == [1, 2]


@pytest.mark.parametrize("contract", ["v0", "v1"])
def test_r15a_the_four_of_eight_that_are_there_are_in_the_batch_that_waited_for_them(scene, contract):
    if contract == "v0":
        start_v0(scene)
        bound, free = (
            scene.register_env(name, 4, min_batch_allocation=least).json()["env_id"]
            for name, least in (("bound", 1.0), ("free", None))
        )
        post, batch = (lambda ident, env_id: scene.post(ident, 4, env_id)), scene.poll
    else:
        scene.begin()
        bound, free = (
            scene.register_v1(name, 4, min_batch_allocation=least).environment_id
            for name, least in (("bound", 1.0), ("free", None))
        )
        post, batch = (lambda ident, env_id: scene.send(env_id, ident)), (lambda: scene.batch(1))
    post(1, free)
    post(2, free)
    post(3, bound)
    assert batch() is None
    for _ in range(4):
        scene.now += 30
        scene.http.get(f"/status-env?env_id={bound}")
    assert batch() == [1, 3]
