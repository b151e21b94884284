"""The v1 contract over a real socket, with our own client."""

import concurrent.futures
import time

import httpx
import pytest

from atropos_api.client import BatchCommitted, BrokerClient, BrokerRefused, RunSuperseded
from atropos_api.testing import make_group, served_broker
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest


class Loop:
    """A client that is both environment and trainer."""

    def __init__(self, client):
        self.client = client
        self.run = None
        self.environment_id = None

    def register(self, name="env", **options):
        request = EnvironmentRequest(**({"name": name, "group_size": 4, "max_token_length": 64} | options))
        info = self.client.register_environment(request)
        self.environment_id = info.environment_id
        return info

    def begin(self, **options):
        defaults = {"name": "run", "batch_size": 8, "max_token_length": 64, "num_steps": 10}
        self.run = self.client.begin_run(RunRequest(**(defaults | options)))
        return self.run

    def send(self, *idents, size=4, **fields):
        groups = [make_group(size, first_token=ident * 1000, **fields) for ident in idents]
        return self.client.submit(self.environment_id, groups, idempotency_key=f"key-{idents}-{time.monotonic_ns()}")

    def batch(self, number, *, wait=0.0, **options):
        arguments = {"run_id": self.run.run_id, "epoch": self.run.epoch, "wait_seconds": wait} | options
        found = self.client.get_batch(number, **arguments)
        return None if found is None else [group.tokens[0][0] // 1000 for group in found.groups]

    def publish(self, version, step):
        update = PolicyUpdate(run_id=self.run.run_id, version=version, step=step, published_at=time.time())
        self.client.update_policy(update)

    def commit(self, number):
        self.client.commit(number, run_id=self.run.run_id, epoch=self.run.epoch)


@pytest.fixture
def loop(request):
    with served_broker(**getattr(request, "param", {})) as url, BrokerClient(url, retry_seconds=1.0) as client:
        yield Loop(client)


def test_a_batch_is_the_same_each_time_until_it_is_committed(loop):
    loop.register()
    loop.begin()
    loop.send(1, 2, 3, 4)
    assert loop.batch(1) == loop.batch(1) == [1, 2]
    assert loop.batch(2) == [3, 4]
    loop.commit(1)
    with pytest.raises(BatchCommitted, match="the next one is 2"):
        loop.batch(1)
    assert loop.batch(2) == [3, 4]


def test_the_bytes_of_a_batch_do_not_change_between_answers(loop):
    loop.register()
    loop.begin()
    loop.send(1, 2, version=3)
    url = f"{loop.client.url}/v1/batches/1"
    assert httpx.get(url).content == httpx.get(url).content


def test_a_long_poll_is_answered_when_the_batch_can_be_formed(loop):
    loop.register()
    loop.begin()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.batch, 1, wait=10.0)
        time.sleep(0.2)
        loop.send(1, 2)
        assert waiting.result(timeout=3) == [1, 2]


def test_a_long_poll_ends_without_a_batch_after_its_time(loop):
    loop.begin()
    response = httpx.get(f"{loop.client.url}/v1/batches/1?wait=0.1")
    assert (response.status_code, response.headers["retry-after"]) == (204, "0")


def test_batches_out_of_order_are_refused_with_the_numbers(loop):
    loop.begin()
    with pytest.raises(BrokerRefused, match="1 is the highest to ask for") as caught:
        loop.batch(3)
    assert (caught.value.status, caught.value.kind) == (409, "batch-out-of-order")


def test_a_takeover_supersedes_the_older_trainer(loop):
    loop.begin()
    old = loop.run
    assert loop.begin(resume=True).epoch == old.epoch + 1
    with pytest.raises(RunSuperseded):
        loop.client.get_batch(1, run_id=old.run_id, epoch=old.epoch)
    with pytest.raises(RunSuperseded):
        loop.client.commit(1, run_id=old.run_id, epoch=old.epoch)
    with pytest.raises(RunSuperseded):
        loop.client.finish_run(old.run_id, epoch=old.epoch)
    assert loop.client.status()["run"]["state"] == "open"
    loop.client.finish_run(loop.run.run_id, epoch=loop.run.epoch)
    assert loop.client.status()["run"]["state"] == "finished"


def test_an_operator_ends_a_run_of_any_trainer(loop):
    run_id = loop.begin(resume=True).run_id
    for body in ({"json": {}}, {"content": b""}):
        assert httpx.post(f"{loop.client.url}/v1/runs/{run_id}/finish", **body).status_code == 204
    assert loop.client.status()["run"]["state"] == "finished"


def test_a_superseded_trainer_is_told_while_it_waits(loop):
    loop.begin()
    old = loop.run
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.client.get_batch, 1, run_id=old.run_id, epoch=old.epoch, wait_seconds=10.0)
        time.sleep(0.2)
        loop.begin(name="another", take_over=True)
        with pytest.raises(RunSuperseded):
            waiting.result(timeout=3)


def test_groups_of_one_run_are_never_served_to_another(loop):
    loop.register()
    loop.begin()
    loop.send(1, 2, 3)
    info = loop.begin(name="next", take_over=True)
    assert info.leftover_groups == 3
    assert loop.batch(1) is None


def test_groups_that_came_before_any_run_belong_to_the_first(loop):
    loop.register()
    loop.send(1, 2)
    loop.begin()
    assert loop.batch(1) == [1, 2]


def test_a_resumed_run_goes_on_after_its_checkpoint(loop):
    loop.register()
    loop.begin()
    loop.send(1, 2, 3, 4, 5, 6)
    for number in (1, 2, 3):
        loop.batch(number)
    loop.commit(1)
    info = loop.begin(resume=True, resume_from_batch=1)
    assert (info.next_batch, info.committed_batch) == (2, 1)
    assert (loop.batch(2), loop.batch(3)) == ([3, 4], [5, 6])


def test_batches_that_no_longer_fit_go_back_to_their_old_places(loop):
    loop.register()
    loop.begin()
    loop.send(1, 2, 3, 4)
    loop.batch(1)
    loop.begin(resume=True, batch_size=12)
    assert loop.batch(1) == [1, 2, 3]


def test_ranks_get_whole_groups_balanced_by_tokens(loop):
    loop.register()
    loop.begin(batch_size=16, world_size=2)
    loop.send(2, 3, 4, length=10)
    loop.send(1, length=30)
    slices = [loop.batch(1, rank=rank, world_size=2) for rank in (0, 1)]
    assert slices == [[1], [2, 3, 4]]
    assert sorted(ident for rank in range(8) for ident in loop.batch(1, rank=rank, world_size=8)) == [1, 2, 3, 4]


def test_a_rank_outside_the_world_is_refused(loop):
    loop.begin()
    with pytest.raises(BrokerRefused, match="rank 2 is not below the world size 2"):
        loop.batch(1, rank=2, world_size=2)


def test_a_repeat_under_the_same_key_changes_nothing(loop):
    loop.register()
    loop.begin()
    for wanted in ((2, 0), (0, 2)):
        groups = [make_group(4), make_group(4)]
        answer = loop.client.submit(loop.environment_id, groups, idempotency_key="same")
        assert (answer.accepted, answer.duplicates) == wanted
    assert loop.client.status()["queue"]["groups"] == 2


def test_an_environment_keeps_its_id_over_a_restart(loop):
    assert loop.register("a").environment_id == loop.register("a").environment_id
    assert loop.register("b").environment_id != loop.register("a").environment_id


def test_an_unknown_environment_is_a_404_that_names_it(loop):
    with pytest.raises(BrokerRefused, match="no environment has the id 17") as caught:
        loop.client.heartbeat(17)
    assert caught.value.status == 404


def test_policies_rise_and_repeats_are_harmless(loop):
    loop.begin()
    loop.publish(3, 1)
    loop.publish(3, 1)
    with pytest.raises(BrokerRefused, match=r"version 2 .* is not above 3"):
        loop.publish(2, 1)
    assert loop.begin(resume=True).highest_policy_version == 3


@pytest.mark.parametrize("loop", [{"max_staleness": 1}], indirect=True)
def test_groups_beyond_the_staleness_budget_are_expired_and_counted(loop):
    loop.register()
    loop.begin()
    loop.publish(10, 0)
    loop.send(1, 2, version=10)
    loop.publish(11, 2)
    assert loop.batch(1) is None
    assert loop.client.status()["counters"]["groups_expired_total"] == 2


@pytest.mark.parametrize("loop", [{"max_staleness": 1}], indirect=True)
def test_age_is_counted_in_steps_not_in_versions(loop):
    loop.register()
    loop.begin()
    loop.publish(10, 0)
    loop.send(1, 2, version=10)
    loop.publish(40, 1)
    assert loop.batch(1) == [1, 2]


@pytest.mark.parametrize("loop", [{"max_staleness": 0}], indirect=True)
def test_groups_without_a_version_age_from_when_they_were_received(loop):
    loop.register()
    loop.begin()
    loop.publish(1, 0)
    loop.send(1, 2)
    loop.publish(2, 1)
    assert loop.batch(1) is None


@pytest.mark.parametrize("loop", [{"require_versions": True}], indirect=True)
def test_groups_without_a_version_can_be_refused(loop):
    loop.register()
    with pytest.raises(BrokerRefused, match=r"groups\[0\]\.policy_versions"):
        loop.send(1)


def test_orphaned_groups_are_served_and_counted(loop):
    loop.register()
    loop.begin()
    loop.publish(1, 0)
    loop.publish(2, 1)
    loop.send(1, 2, version=2)
    loop.begin(resume=True, resume_from_batch=0)
    loop.publish(3, 0)
    assert loop.batch(1) == [1, 2]
    assert loop.client.status()["counters"]["groups_orphaned_total"] == 2


def test_room_shrinks_with_what_is_queued_and_returns_with_training(loop):
    loop.register()
    loop.begin(max_staleness=1)
    assert loop.client.heartbeat(loop.environment_id).room_sequences == 16
    assert loop.send(1, 2).pacing.room_sequences == 8
    loop.batch(1)
    assert loop.client.heartbeat(loop.environment_id).outstanding_sequences == 8
    loop.publish(1, 1)
    pacing = loop.client.heartbeat(loop.environment_id)
    assert (pacing.outstanding_sequences, pacing.room_sequences, pacing.current_step) == (0, 16, 1)


def test_no_room_is_given_for_what_the_run_will_never_train(loop):
    loop.register()
    loop.begin(num_steps=1)
    assert loop.client.heartbeat(loop.environment_id).room_sequences == 8
    assert loop.send(1, 2).pacing.room_sequences == 0


def test_room_is_shared_by_weight(loop):
    heavy = loop.register("heavy", weight=3.0).environment_id
    light = loop.register("light", weight=1.0).environment_id
    loop.begin(batch_size=16, max_staleness=0)
    rooms = [loop.client.heartbeat(environment_id).room_sequences for environment_id in (heavy, light)]
    assert rooms == [12, 4]


def test_a_heartbeat_waits_for_the_next_revision(loop):
    loop.register()
    loop.begin()
    pacing = loop.client.heartbeat(loop.environment_id)
    started = time.monotonic()
    same = loop.client.heartbeat(loop.environment_id, revision=pacing.revision, wait_seconds=0.3)
    assert same.revision == pacing.revision
    assert time.monotonic() - started >= 0.25
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(loop.client.heartbeat, loop.environment_id, revision=pacing.revision, wait_seconds=10.0)
        time.sleep(0.1)
        loop.publish(1, 1)
        assert waiting.result(timeout=3).policy_version == 1


def test_the_end_of_a_run_reaches_its_environments_and_not_the_next_ones(loop):
    old = loop.register("old").environment_id
    loop.begin()
    loop.client.heartbeat(old)
    loop.client.finish_run(loop.run.run_id, epoch=loop.run.epoch)
    loop.client.finish_run(loop.run.run_id, epoch=loop.run.epoch)
    assert loop.client.heartbeat(old).state == "finished"
    assert loop.register("early for the next").pacing.state == "wait"


def test_an_environment_that_leaves_is_disconnected_at_once_and_back_at_its_next_call(loop):
    env = loop.register().environment_id
    loop.client.leave(env)
    loop.client.leave(env)
    assert loop.client.status()["environments"][0]["connected"] is False
    loop.client.heartbeat(env)
    assert loop.client.status()["environments"][0]["connected"] is True
    with pytest.raises(BrokerRefused) as caught:
        loop.client.leave(77)
    assert (caught.value.status, caught.value.kind) == (404, "unknown-environment")


def test_late_groups_of_a_finished_run_are_not_the_next_ones(loop):
    loop.register()
    loop.begin()
    loop.client.heartbeat(loop.environment_id)
    loop.client.finish_run(loop.run.run_id, epoch=loop.run.epoch)
    loop.send(1, 2)
    loop.begin(name="next")
    assert loop.batch(1) is None


def test_an_invalid_group_is_refused_with_field_and_value(loop):
    loop.register()
    group = make_group(2)
    group.tokens[1][0] = -5
    with pytest.raises(BrokerRefused) as caught:
        loop.client.submit(loop.environment_id, [make_group(2), group], idempotency_key="k")
    assert caught.value.problem["field"] == "groups[1].tokens[1][0]"
    assert caught.value.problem["value"] == -5
    assert loop.client.status()["queue"]["groups"] == 0


def test_a_group_size_that_no_partner_could_help_is_refused(loop):
    loop.begin(batch_size=12)
    with pytest.raises(BrokerRefused, match="groups of 13 are larger than a batch of 12 sequences") as caught:
        loop.register(group_size=13)
    assert (caught.value.status, caught.value.kind) == (422, "group-size-cannot-fill-batch")


@pytest.mark.parametrize("loop", [{"max_queued_sequences": 4}], indirect=True)
def test_pressure_is_a_503_that_may_be_retried(loop):
    loop.register()
    loop.send(1)
    started = time.monotonic()
    with pytest.raises(BrokerRefused) as caught:
        loop.send(2)
    assert (caught.value.status, caught.value.kind) == (503, "queue-full")
    assert time.monotonic() - started < 5


def test_every_problem_is_problem_json(loop):
    for method, path in (("GET", "/v1/batches/1"), ("GET", "/v1/batches/x"), ("POST", "/v1/runs"), ("GET", "/v1/no")):
        response = httpx.request(method, loop.client.url + path)
        assert response.headers["content-type"] == "application/problem+json"
        assert {"type", "title", "status", "detail"} <= response.json().keys()


def test_events_are_resumed_after_the_last_id(loop):
    loop.register()
    first = loop.client.status()
    loop.begin()
    with httpx.stream("GET", f"{loop.client.url}/v1/events", headers={"Last-Event-ID": "0"}) as response:
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if line == "event: status":
                break
    assert [line for line in lines if line.startswith("event:")] == [
        "event: environment-registered", "event: run-began", "event: status",
    ]  # fmt: skip
    assert first["run"] is None


def test_operators_routes_answer(loop):
    http = httpx.Client(base_url=loop.client.url)
    for path in ("/livez", "/readyz", "/health", "/docs", "/openapi.json", "/metrics", "/v1/status"):
        assert http.get(path).status_code == 200
    assert http.get("/v1/groups/latest").status_code == 204
    loop.register()
    loop.send(5)
    assert http.get("/v1/groups/latest").json()["tokens"][0][0] == 5000
    http.close()


@pytest.mark.parametrize("loop", [{"max_uncommitted": 2}], indirect=True)
def test_the_bound_on_open_batches_leaves_room_for_a_checkpoint_interval(loop):
    loop.register()
    loop.begin(checkpoint_interval=3, batch_size=4)
    loop.send(*range(1, 8))
    assert [loop.batch(number) for number in range(1, 6)] == [[1], [2], [3], [4], [5]]
    with pytest.raises(BrokerRefused, match="at most 5 may be open"):
        loop.batch(6)


def test_a_batch_may_mix_any_sizes_and_is_exact(loop):
    loop.register()
    loop.begin(batch_size=8)
    loop.send(1, size=3)
    loop.send(2, size=4)
    assert loop.batch(1) is None
    loop.send(3, size=5)
    assert loop.batch(1) == [1, 3]


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, -1, 0, "8", None, 1.5])
@pytest.mark.parametrize("field", ["batch_size", "num_steps", "world_size"])
def test_no_number_in_a_run_makes_the_broker_fail(loop, field, value):
    body = {"name": "r", "batch_size": 8, "max_token_length": 9, "num_steps": 3, field: value}
    assert httpx.post(f"{loop.client.url}/v1/runs", json=body).status_code in {200, 422}
    assert httpx.get(f"{loop.client.url}/v1/status").status_code == 200
    body = {"name": "e", "group_size": 4, "max_token_length": 9}
    assert httpx.post(f"{loop.client.url}/v1/environments", json=body).status_code in {200, 422}
