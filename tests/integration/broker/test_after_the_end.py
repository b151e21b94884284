"""After the end of a run, environments that stay or connect late are told to stop or to wait for the next run."""

from atropos_api.client import BrokerClient
from atropos_api.wire import EnvironmentRequest, RunRequest


def finish(legacy):
    run_id = legacy.http.get("/v1/status").json()["run"]["run_id"]
    assert legacy.http.post(f"/v1/runs/{run_id}/finish").status_code == 204


def test_legacy_environments_of_a_finished_run_see_a_step_above_its_last(legacy):
    legacy.start(num_steps=10)
    env_id = legacy.register_env()["env_id"]
    assert legacy.status_env(env_id).json()["current_step"] == 0
    finish(legacy)
    answer = legacy.status_env(env_id).json()
    # Their own rule: stop when current_step + queue_size * group_size // batch_size > total_steps.
    assert answer["current_step"] + answer["queue_size"] * 4 // 8 > 10


def test_after_the_end_everything_answers_as_before_any_run(legacy):
    legacy.start()
    assert legacy.http.get("/wandb_info").json() == {"group": "group", "project": "project"}
    finish(legacy)
    assert legacy.http.get("/wandb_info").json() == {"group": None, "project": None}
    assert legacy.http.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert legacy.http.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert legacy.http.get("/batch").json()["status"] == "error"


def test_a_legacy_environment_that_comes_after_the_end_waits_for_the_next_trainer(legacy):
    legacy.start()
    finish(legacy)
    assert legacy.register_env() == {"status": "wait for trainer to start"}
    legacy.start(wandb_group="next")
    assert legacy.register_env()["status"] == "success"


def test_late_groups_of_a_finished_run_are_accepted_and_kept_apart(legacy):
    legacy.start(batch_size=4)
    env_id = legacy.register_env()["env_id"]
    finish(legacy)
    assert legacy.post(1, env_id=env_id).status_code == 200
    legacy.start(batch_size=4, wandb_group="next")
    assert legacy.batch() is None
    legacy.post(2, env_id=env_id)
    assert legacy.idents() == [2]


def test_the_same_under_v1(legacy):
    with BrokerClient(legacy.url) as client:
        run = client.begin_run(RunRequest(name="run", batch_size=8, max_token_length=9, num_steps=3))
        request = EnvironmentRequest(name="early", group_size=4, max_token_length=9)
        early = client.register_environment(request).environment_id
        waiting = client.heartbeat(early)
        client.finish_run(run.run_id, epoch=run.epoch)
        pacing = client.heartbeat(early, revision=waiting.revision, wait_seconds=10.0)
        assert (pacing.state, pacing.num_steps, pacing.room_sequences) == ("finished", 3, 0)
        late = client.register_environment(EnvironmentRequest(name="late", group_size=4, max_token_length=9))
        assert (late.pacing.state, late.run_id, late.batch_size) == ("wait", None, 0)
        # An environment that registers again waits for the next run.
        assert client.register_environment(request).pacing.state == "wait"
