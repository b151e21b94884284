"""Each fault found in Atropos' own server, by its number, and our server's behaviour instead.

Kills under load are in `test_process.py`; time and memory are measured in `benchmarks/broker`.
"""

import concurrent.futures
import gzip
import json
import socket
import time

import pytest

from atropos_api.broker import Broker
from atropos_api.config import BrokerConfig
from atropos_api.server.app import create_app
from atropos_api.store.factory import open_store
from atropos_api.testing import serve_in_thread, served_broker
from atropos_api.wire.group_json import check_group, decode_fields, finish_text

WIRE_KEYS = [
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
]  # fmt: skip


def test_b1_a_restart_finds_run_step_environments_queue_and_batch_as_they_were(tmp_path, legacy_client):
    def serve():
        config = BrokerConfig(store=str(tmp_path))
        broker = Broker(*open_store(config.store, fsync="never", fresh=False))
        return broker, serve_in_thread(create_app(config, broker))

    broker, served = serve()
    with served as url, legacy_client(url) as legacy:
        legacy.start(batch_size=4)
        env_id = legacy.register_env()["env_id"]
        for ident in (1, 2, 3):
            legacy.post(ident, env_id=env_id)
        assert legacy.idents() == [1]
    broker.close()
    broker, served = serve()
    with served as url, legacy_client(url) as legacy:
        assert legacy.http.get("/status").json() == {"current_step": 1, "queue_size": 2}
        assert legacy.status_env(env_id).status_code == 200
        assert [legacy.idents(), legacy.idents(), legacy.batch()] == [[2], [3], None]
    broker.close()


def test_b2_a_batch_whose_answer_broke_off_is_answered_again(legacy):
    legacy.start(batch_size=4)
    # Far more than the kernel buffers of a loopback connection hold.
    big = "x" * 40_000_000
    legacy.post(1, images=big)
    host, port = legacy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /batch HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert legacy.idents() == [1]
    assert legacy.batch() is None


def test_b2_a_restarted_trainer_is_offered_the_uncommitted_batch_again(legacy):
    legacy.start()
    for ident in (1, 2, 3, 4):
        legacy.post(ident)
    assert legacy.idents() == [1, 2]
    legacy.register()
    assert legacy.idents() == [1, 2]
    assert legacy.idents() == [3, 4]


def test_b3_batches_come_out_in_the_order_the_groups_came_in(legacy):
    legacy.start(batch_size=4)
    for ident in range(5):
        legacy.post(ident)
    assert [legacy.idents() for _ in range(5)] == [[0], [1], [2], [3], [4]]


def test_b4_the_step_counts_batches_handed_out_not_formed(legacy):
    legacy.start(batch_size=4)
    for ident in range(5):
        legacy.post(ident)
    legacy.batch()
    assert legacy.http.get("/status").json() == {"current_step": 1, "queue_size": 4}


def test_b5_groups_that_come_before_the_trainer_wait_for_it(legacy):
    assert legacy.post(7).json() == {"status": "received"}
    legacy.register(batch_size=4)
    assert legacy.idents() == [7]


def test_b5_a_post_between_reset_and_register_wedges_nothing(legacy):
    legacy.start()
    legacy.http.get("/reset_data")
    legacy.post(1)
    legacy.register(batch_size=4)
    assert legacy.http.get("/info").json() == {"batch_size": 4, "max_token_len": 64}
    assert legacy.idents() == [1]


def test_b6_a_second_register_replaces_the_configuration(legacy):
    legacy.start()
    legacy.register(batch_size=4, max_token_len=99)
    assert legacy.http.get("/info").json() == {"batch_size": 4, "max_token_len": 99}


def test_b6_a_trainer_of_another_name_begins_anew_without_the_others_groups(legacy):
    legacy.start(batch_size=4)
    legacy.post(1)
    run_id = legacy.http.get("/v1/status").json()["run"]["run_id"]
    assert legacy.register(wandb_group="other", batch_size=4).status_code == 409
    legacy.http.post(f"/v1/runs/{run_id}/finish")
    assert legacy.register(wandb_group="other", batch_size=4).status_code == 200
    assert legacy.batch() is None
    assert legacy.http.get("/v1/status").json()["left_over_groups"] != {}


def test_b7_a_page_of_another_origin_cannot_reset(legacy):
    legacy.start(batch_size=4)
    legacy.post(1)
    for headers in ({"Origin": "http://evil.test"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.test"}):
        for path in ("/reset_data", "/batch"):
            assert legacy.http.get(path, headers=headers).status_code == 403
    assert legacy.idents() == [1]


def test_b7_after_a_reset_there_is_no_batch_and_no_500(legacy):
    legacy.start()
    assert legacy.http.get("/reset_data").text == "Reset successful"
    assert legacy.http.get("/batch").json()["status"] == "error"
    assert legacy.register_env() == {"status": "wait for trainer to start"}


@pytest.mark.parametrize("poison", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs", "generation_params"])
def test_b8_what_is_not_finite_is_refused_by_name_and_harms_no_batch(legacy, make_group, poison, field):
    legacy.start(batch_size=4)
    text = {"scores": "[0,1,%s,3]", "inference_logprobs": "[[0,0,%s],[0,0,0],[0,0,0],[0,0,0]]"}
    value = text.get(field, '{"temperature": %s}') % poison
    body = json.dumps(make_group(1))[:-1] + f', "{field}": {value}}}'
    response = legacy.http.post("/scored_data", content=body)
    assert response.status_code == 422
    assert field in response.json()["field"]
    assert response.json()["detail"][0]["loc"][:2] == ["body", field]
    legacy.post(2)
    assert legacy.idents() == [2]
    assert legacy.http.get("/latest_example").status_code == 200


def test_b8_a_lone_surrogate_is_refused(legacy, make_group):
    body = json.dumps(make_group() | {"messages": [[{"role": "user", "content": "X"}]]}).replace("X", "\\ud800")
    assert legacy.http.post("/scored_data", content=body).status_code == 422


def test_b9_groups_of_three_and_one_leave_with_others(legacy):
    legacy.start()
    legacy.register_env()
    for ident, size in ((1, 3), (2, 1), (3, 4)):
        legacy.post(ident, size)
    assert legacy.idents() == [1, 2, 3]


def test_b9_a_group_no_batch_can_use_yet_is_called_buffered(legacy):
    legacy.start()
    legacy.register_env()
    assert legacy.post(1, 3).json() == {"status": "buffered", "buffer_size": 3}
    assert legacy.post(2, 1).json() == {"status": "received"}


def test_b10_a_size_that_fills_no_batch_is_reported_at_registration(legacy):
    legacy.start(batch_size=12)
    response = legacy.http.post(
        "/register-env", json={"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 8}
    )
    # Atropos' clients log it and ask again: another environment may complete it.
    assert response.json()["status"].startswith("wait: groups of 8 alone never fill 12 sequences")
    response = legacy.http.post(
        "/register-env", json={"max_token_length": 1, "desired_name": "e", "weight": 1.0, "group_size": 13}
    )
    assert response.status_code == 422
    assert "groups of 13 are larger than a batch of 12" in response.text


def test_b11_an_oversize_group_does_not_throttle_its_environment(legacy):
    legacy.start()
    legacy.register_env()
    legacy.post(1, 9)
    assert legacy.status_env(0).json()["queue_size"] == 0
    assert legacy.http.get("/v1/status").json()["queue"]["unpackable_sizes"] == [9]
    metrics = legacy.http.get("/metrics").text
    assert "atropos_unpackable_groups 1.0\n" in metrics
    assert "atropos_groups_unpackable_total 1.0\n" in metrics


@pytest.mark.parametrize("legacy", [{"min_allocation_wait": 0.2}], indirect=True)
def test_b12_an_environment_without_data_holds_up_a_batch_only_for_a_while(legacy):
    legacy.start(batch_size=4)
    legacy.register_env(min_batch_allocation=0.5)
    legacy.register_env(desired_name="other")
    legacy.post(1, env_id=1)
    assert legacy.batch() is None
    time.sleep(0.25)
    assert legacy.idents() == [1]
    assert "atropos_minima_waived_total 1" in legacy.http.get("/metrics").text


@pytest.mark.parametrize("legacy", [{"environment_timeout": 0.1}], indirect=True)
def test_b12_the_minimum_of_a_silent_environment_is_void(legacy):
    legacy.start(batch_size=4)
    legacy.register_env(min_batch_allocation=0.5)
    time.sleep(0.15)
    legacy.post(1, env_id=None)
    assert legacy.idents() == [1]


def test_b12_minima_are_met_before_anything_else(legacy):
    legacy.start()
    legacy.register_env(min_batch_allocation=0.5)
    legacy.register_env(desired_name="other")
    for ident, env_id in ((1, 1), (2, 1), (3, 0)):
        legacy.post(ident, env_id=env_id)
    assert legacy.idents() == [1, 3]


def test_b13_data_without_env_id_is_used_while_minima_exist(legacy):
    legacy.start()
    legacy.register_env(min_batch_allocation=0.5)
    legacy.post(1, env_id=None)
    legacy.post(2, env_id=0)
    assert legacy.idents() == [1, 2]


def test_b14_a_restarted_environment_gets_its_old_entry_back(legacy):
    legacy.start()
    first = legacy.register_env()
    legacy.http.post("/disconnect-env", json={"env_id": first["env_id"]})
    again = legacy.register_env()
    assert (again["env_id"], again["wandb_name"]) == (first["env_id"], "env_0")
    assert legacy.register_env()["wandb_name"] == "env_1"


def test_b15_ids_are_never_given_to_another_environment(legacy):
    legacy.start()
    old = legacy.register_env()["env_id"]
    legacy.http.get("/reset_data")
    legacy.start()
    assert legacy.register_env(desired_name="new")["env_id"] != old


@pytest.mark.parametrize("env_id", [-1, 5, 2**70])
def test_b16_an_unknown_id_is_answered_404_or_failure(legacy, env_id):
    legacy.start()
    legacy.register_env()
    assert legacy.status_env(env_id).status_code == 404
    assert legacy.http.post("/disconnect-env", json={"env_id": env_id}).json()["status"] == "failure"
    assert legacy.status_env(0).status_code == 200


def test_b16_a_group_of_an_unknown_environment_is_taken_and_counted(legacy):
    legacy.start(batch_size=4)
    assert legacy.post(1, env_id=-1).status_code == 200
    assert legacy.idents() == [1]
    assert "atropos_groups_unregistered_total 1" in legacy.http.get("/metrics").text


def test_b17_no_weight_at_all_divides_nothing_by_zero(legacy):
    legacy.start()
    legacy.register_env(weight=-1)
    assert legacy.status_env(0).json()["env_weight"] == 1.0


def test_b18_other_environments_count_with_group_size_one(legacy):
    legacy.start()
    legacy.register_env(group_size=1)
    legacy.register_env(desired_name="other", group_size=1)
    for ident in range(3):
        legacy.post(ident, 1, env_id=1)
    answer = legacy.status_env(0).json()
    assert (answer["queue_size"], answer["self_queue_size"]) == (3, 0)


@pytest.mark.parametrize("legacy", [{"max_body_bytes": 2000, "max_inflated_bytes": 5000}], indirect=True)
def test_b19_bodies_are_bounded_as_sent_and_as_inflated(legacy):
    assert legacy.http.post("/scored_data", content=b" " * 3000).status_code == 413
    bomb = gzip.compress(b" " * 1_000_000)
    assert legacy.http.post("/scored_data", content=bomb, headers={"Content-Encoding": "gzip"}).status_code == 413


@pytest.mark.parametrize("legacy", [{"max_queued_sequences": 8}], indirect=True)
def test_b19_a_full_queue_holds_the_answer_back_until_there_is_room(legacy):
    legacy.start(batch_size=4)
    legacy.post(1)
    legacy.post(2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        third = pool.submit(legacy.post, 3)
        time.sleep(0.2)
        assert not third.done()
        assert legacy.idents() == [1]
        # Handing out makes room; the commit that comes with the next call wakes the waiting callers.
        assert legacy.idents() == [2]
        assert third.result(timeout=5).json() == {"status": "received"}


def test_b20_status_env_and_batch_do_not_slow_down_with_the_queue(legacy, make_group):
    legacy.start()
    legacy.register_env()
    groups = [make_group(ident) for ident in range(500)]

    def seconds(call, repeats=10):
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - started

    few = seconds(lambda: legacy.status_env(0))
    for _ in range(6):
        assert legacy.http.post("/scored_data_list", json=groups).status_code == 200
    assert seconds(lambda: legacy.status_env(0)) < 5 * few + 0.2
    assert seconds(legacy.batch) < 5 * few + 0.3


def test_b21_a_repeat_under_the_same_key_is_not_a_second_group(legacy, make_group):
    legacy.start(batch_size=4)
    for _ in range(2):
        response = legacy.http.post("/scored_data", json=make_group(1), headers={"Idempotency-Key": "k"})
        assert response.status_code == 200
    assert legacy.idents() == [1]
    assert legacy.batch() is None


@pytest.mark.parametrize(("invalid", "place"), [({"masks": [[1], [2], [3], [4]]}, ["masks", 0]), (None, ["tokens"])])
def test_b22_an_invalid_group_in_a_list_costs_its_neighbours_nothing(legacy, make_group, invalid, place):
    legacy.start()
    group = None if invalid is None else make_group(2) | invalid
    response = legacy.http.post("/scored_data_list", json=[make_group(1), group, make_group(3)])
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", 1, *place]
    assert response.json()["groups_processed"] == 2
    assert legacy.idents() == [1, 3]


@pytest.mark.parametrize(
    "body",
    [b"abc", gzip.compress(b"{}" * 500)[:-9], b"\x1f\x8b\x08\x00" + b"\xff" * 40],
    ids=["no header", "cut off", "broken"],
)
def test_b23_a_broken_gzip_body_is_the_clients_fault(legacy, body):
    response = legacy.http.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert response.text.startswith("Invalid gzip payload")


def test_b24_groups_say_under_which_policy_they_were_received(legacy):
    legacy.start(batch_size=4)
    legacy.post(1, policy_versions=[[[1, 3, 4]]] * 4)
    item = legacy.batch()[0]
    assert item["received_version"] is None
    assert item["policy_versions"] == [[[1, 3, 4]]] * 4


def test_b24_a_group_that_says_no_version_is_stamped_with_the_published_one(legacy):
    request = {"name": "run", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
    run_id = legacy.http.post("/v1/runs", json=request).json()["run_id"]
    policy = {"run_id": run_id, "version": 7, "step": 0, "published_at": 1.0}
    assert legacy.http.put("/v1/policy", json=policy).json()["version"] == 7
    legacy.post(1)
    group = legacy.http.get("/v1/batches/1").json()["groups"][0]
    assert (group["received_version"], group.get("policy_versions")) == (7, None)


def test_b25_status_env_always_has_the_same_keys(legacy):
    legacy.start()
    legacy.register_env()
    keys = {"current_step", "queue_size", "unallocated_fraction", "self_queue_size", "max_group_size", "env_weight"}
    assert set(legacy.status_env(0).json()) == keys
    legacy.http.get("/reset_data")
    assert set(legacy.status_env(0).json()) == keys


def test_b26_the_trainers_uuid_fits_every_json_reader(legacy):
    assert 0 <= legacy.register().json()["uuid"] < 2**53


def test_b27_taking_a_group_in_costs_less_than_reading_it_into_objects_once():
    rows = [list(range(2048))] * 8
    floats = [[-0.123456789] * 2048] * 8
    body = json.dumps({"tokens": rows, "masks": rows, "scores": [0.0] * 8, "inference_logprobs": floats}).encode()

    def least_seconds(call):
        times = []
        for _ in range(20):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)

    taken = least_seconds(lambda: finish_text(check_group(decode_fields(body)), 1))
    assert taken < 0.7 * least_seconds(lambda: json.loads(body))


def test_b28_brokers_on_ports_of_their_own_share_nothing(legacy, legacy_client):
    with served_broker() as url, legacy_client(url) as other:
        legacy.start(batch_size=4)
        legacy.post(1)
        assert other.http.get("/batch").json()["status"] == "error"
        other.start(batch_size=4)
        assert other.batch() is None
        assert legacy.idents() == [1]
