"""The Atropos contract: where its own server has no fault, keys, texts and answers are the same."""

import concurrent.futures
import gzip
import json

import pytest

WIRE_KEYS = [
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
]  # fmt: skip


def test_items_carry_all_fourteen_keys_in_their_order_and_the_text_that_was_sent(legacy, make_group):
    legacy.start(batch_size=4)
    body = json.dumps(make_group(1) | {"advantages": [], "scores": [0.1, 1e-07, 3, 2.50]}, indent=1)
    legacy.http.post("/scored_data", content=body)
    text = legacy.http.get("/batch").text
    item = json.loads(text)["batch"][0]
    assert list(item)[:14] == WIRE_KEYS
    assert item["advantages"] == []
    assert item["messages"] is None
    assert "1e-07" in text


def test_unknown_keys_survive(legacy, make_group):
    legacy.start(batch_size=4)
    legacy.http.post("/scored_data", json=make_group(1) | {"ours": {"a": [1]}})
    assert legacy.batch()[0]["ours"] == {"a": [1]}


def test_bodies_are_compressed_both_ways_when_asked(legacy, make_group):
    legacy.start(batch_size=4)
    body = gzip.compress(json.dumps(make_group(1) | {"images": "x" * 2000}).encode())
    assert legacy.http.post("/scored_data", content=body, headers={"Content-Encoding": "gzip"}).status_code == 200
    response = legacy.http.get("/batch", headers={"Accept-Encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    assert response.json()["batch"][0]["images"] == "x" * 2000


def test_numbers_as_text_are_read_as_atropos_reads_them(legacy):
    legacy.start(batch_size=1)
    legacy.http.post("/scored_data", json={"tokens": [["5", True, 3.0]], "masks": [[1, 2, 3]], "scores": ["1.5"]})
    item = legacy.batch()[0]
    assert (item["tokens"], item["scores"]) == ([[5, 1, 3]], [1.5])


def test_status_env_answers_body_and_query_alike(legacy):
    legacy.start()
    legacy.register_env()
    assert legacy.http.get("/status-env?env_id=0").json() == legacy.status_env(0).json()


def test_before_registration_everything_answers_as_atropos_does(legacy):
    http = legacy.http
    assert http.get("/").json() == {"message": "AtroposLib API"}
    assert http.get("/batch").json() == {
        "status": "error", "message": "Trainer not registered. Call /register first.", "batch": [],
    }  # fmt: skip
    assert http.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert http.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert http.get("/wandb_info").json() == {"group": None, "project": None}
    example = http.get("/latest_example").json()
    assert len(example) == 9
    assert all(value == [] for value in example.values())


def test_two_pollers_get_a_batch_each(legacy):
    legacy.start(batch_size=4)
    for ident in range(8):
        legacy.post(ident)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: legacy.idents(), range(8)))
    assert sorted(found) == [[ident] for ident in range(8)]


@pytest.mark.parametrize("legacy", [{"max_staleness": 0}], indirect=True)
def test_a_tight_staleness_budget_reaches_legacy_environments_as_a_longer_queue(legacy):
    legacy.start()
    legacy.register_env()
    for ident in range(2):
        legacy.post(ident)
    # One batch waits, which is the limit; the environment's own limit is three batches, six groups.
    assert legacy.status_env(0).json()["queue_size"] == 6


def test_groups_that_no_trainer_can_use_are_counted_for_every_sender(legacy, make_group):
    legacy.start()
    bad = make_group(1) | {"scores": [1.0]}
    legacy.http.post("/v1/environments", json={"name": "env", "group_size": 4, "max_token_length": 9})
    assert legacy.http.post("/scored_data", json=bad).status_code == 422
    assert legacy.http.post("/scored_data_list", json=[bad, make_group(2), bad]).status_code == 422
    assert legacy.http.post("/v1/groups", json={"environment_id": 0, "groups": [bad]}).status_code == 422
    counters = legacy.http.get("/v1/status").json()["counters"]
    assert (counters["groups_refused_total"], counters["groups_received_total"]) == (4, 1)
