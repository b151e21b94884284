"""Runs can be watched: metrics, rollouts and the diagnosis come out as they went in."""

import contextlib
import json
import time

import httpx
import msgspec
import pytest

from atropos_api.broker import Broker
from atropos_api.client import BrokerClient, watch_events
from atropos_api.config import BrokerConfig
from atropos_api.server.app import create_app
from atropos_api.store.factory import open_store
from atropos_api.testing import make_group, make_memory_app, serve_in_thread, served_broker
from atropos_api.wire import EnvironmentRequest, RunRequest, ServerReport
from atropos_api.wire.reports import StepMetrics
from tests.stalls import STALLS, stalled_run

RUN = RunRequest(name="watched", batch_size=8, max_token_length=64, num_steps=30)
NAMED_WITHIN_SECONDS = 10.0


@pytest.fixture
def url():
    with served_broker() as url:
        yield url


@pytest.fixture
def client(url):
    with BrokerClient(url) as client:
        yield client


@contextlib.contextmanager
def stored_broker(directory):
    """Serve a broker whose store is in this directory."""
    config = BrokerConfig(store=str(directory / "store"))
    ledger, bodies = open_store(config.store)
    broker = Broker(ledger, bodies, settings=config)
    with serve_in_thread(create_app(config, broker)) as url:
        yield url
    broker.close()


def get(url, path, **params):
    response = httpx.get(url + path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def report(url, run, steps, **fields):
    body = {"epoch": run.epoch, "steps": [{"step": n, "time": float(n), "values": v} for n, v in steps], **fields}
    return httpx.post(f"{url}/v1/runs/{run.run_id}/metrics", json=body)


def begin_with_a_batch(client, **fields):
    run = client.begin_run(RUN)
    request = EnvironmentRequest(name="gsm8k", group_size=4, max_token_length=64)
    environment = client.register_environment(request).environment_id
    groups = [make_group(4, 6, version=3, **fields), make_group(4, 6, first_token=50)]
    client.submit(environment, groups, idempotency_key="a")
    client.get_batch(1, run_id=run.run_id, epoch=run.epoch)
    return run


def test_reported_steps_come_back_and_a_repeated_report_changes_nothing(client, url):
    run = client.begin_run(RUN)
    for _ in range(2):
        assert (
            report(url, run, [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5, "train/kl": 0.1})]).status_code
            == 204
        )
    path = f"/v1/runs/{run.run_id}"
    assert get(url, f"{path}/metrics")["latest"] == {"reward/mean": 0.5, "train/kl": 0.1}
    found = get(url, f"{path}/series", names="reward/mean,train/kl,unknown")
    assert found["series"]["reward/mean"] == {"steps": [1, 2], "values": [0.25, 0.5]}
    assert found["series"].keys() == {"reward/mean", "train/kl"}
    assert found["last_step"] == 2
    assert client.status()["run"]["metrics_step"] == 2
    assert 0 <= client.status()["run"]["last_step_seconds"] < 60


def test_a_metric_with_commas_in_its_name_is_shown_too(client, url):
    run = client.begin_run(RUN)
    report(url, run, [(1, {"reward/sum, mod 7": 0.25, "reward/mean": 0.5, "train/kl": 0.1})])
    asked = {"names": "reward/mean,train/kl", "name": ["reward/sum, mod 7", "unknown"]}
    found = get(url, f"/v1/runs/{run.run_id}/series", **asked)["series"]
    assert found.keys() == {"reward/mean", "train/kl", "reward/sum, mod 7"}
    assert found["reward/sum, mod 7"] == {"steps": [1], "values": [0.25]}


def test_the_registered_servers_and_their_load_are_in_the_status_the_busiest_first(client):
    report = {"lease_id": "lease-0123", "boot_id": "b", "mode": "fixed", "port": 9001}
    for name, waiting in (("idle", 0), ("full", 7)):
        load = {"running": 3, "waiting": waiting, "kv_free": 0.25, "version": 4, "lease_id": f"lease-of-{name}"}
        client.renew_server(name, ServerReport(**report | load))
    full, idle = client.status()["servers"]
    assert (full["server_id"], full["waiting"], full["kv_free"], full["version"]) == ("full", 7, 0.25, 4)
    assert (idle["server_id"], idle["state"]) == ("idle", "serving")
    assert "lease_id" not in full, "its holder could end the lease"


def test_metrics_survive_a_restart_of_the_broker_and_a_resume_drops_what_is_trained_again(tmp_path):
    with stored_broker(tmp_path) as url, BrokerClient(url) as client:
        run = client.begin_run(RUN)
        report(url, run, [(step, {"reward/mean": float(step)}) for step in range(1, 6)])
    with stored_broker(tmp_path) as url, BrokerClient(url) as client:
        path = f"/v1/runs/{run.run_id}/series"
        assert get(url, path, names="reward/mean")["series"]["reward/mean"]["steps"] == [1, 2, 3, 4, 5]
        client.begin_run(msgspec.structs.replace(RUN, resume=True, resume_from_batch=3))
        assert get(url, path, names="reward/mean")["series"]["reward/mean"]["steps"] == [1, 2, 3]


def test_the_report_of_a_trainer_whose_run_was_taken_over_is_refused(client, url):
    run = client.begin_run(RUN)
    client.begin_run(msgspec.structs.replace(RUN, resume=True))
    answer = report(url, run, [(1, {"a": 1.0})])
    assert answer.status_code == 409
    assert answer.json()["type"].endswith("run-superseded")


def test_a_sign_of_trouble_is_one_event_however_often_it_is_reported(client, url):
    run = client.begin_run(RUN)
    sign = {"sign": "kl", "step": 7, "value": 2.0, "message": "KL 2.00 is above 1", "advice": "lower --lr"}
    for _ in range(3):
        assert report(url, run, [], signs=[sign]).status_code == 204
    with httpx.stream("GET", f"{url}/v1/events?after=0") as stream:
        lines = []
        for line in stream.iter_lines():
            lines.append(line)
            if line == "event: status":
                break
    assert lines.count("event: health") == 1


def test_a_hundred_thousand_steps_are_answered_in_under_a_second():
    """It is CPU time, of client and broker together: wall time would depend on the machine's other load."""
    app = make_memory_app()
    names = [f"metric/{number}" for number in range(40)]
    with serve_in_thread(app) as url, BrokerClient(url) as client, httpx.Client(base_url=url) as http:
        run = client.begin_run(RUN)
        for first in range(1, 100_001, 1000):
            steps = [
                StepMetrics(step=step, time=1.0, values=dict.fromkeys(names, 9.0 if step == 54_321 else 0.1))
                for step in range(first, first + 1000)
            ]
            app.context.broker.metrics.take(run.run_id, steps, known_runs=[run.run_id])
        for _ in range(2):  # the first look reads the store
            began = time.process_time()
            path = f"/v1/runs/{run.run_id}/series?points=1000&names={','.join(names[:8])}"
            found = http.get(path, timeout=20).json()
            assert time.process_time() - began < 1.0
        for line in found["series"].values():
            assert len(line["steps"]) <= 1000
            assert line["values"][line["steps"].index(54_321)] == 9.0


def test_a_rollout_is_found_by_batch_group_and_token_also_after_its_commit(client, url):
    messages = [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": str(row)}] for row in range(4)]
    run = begin_with_a_batch(client, messages=messages)
    client.commit(1, run_id=run.run_id, epoch=run.epoch)
    path = f"/v1/runs/{run.run_id}"
    listed = get(url, f"{path}/groups")
    assert [(one["batch"], one["group"], one["environment"]) for one in listed["groups"]] == [
        (1, 0, "gsm8k"),
        (1, 1, "gsm8k"),
    ]
    document = get(url, f"{path}/batches/1/groups/0")
    assert document["messages"] == messages
    assert [one["reward"] for one in document["samples"]] == [0.0, 1.0, 2.0, 3.0]
    assert document["samples"][0]["sampled_tokens"] == 5
    window = get(url, f"{path}/batches/1/groups/0/samples/2", start=1, count=3)
    assert window["tokens"] == [13, 14, 15]
    assert window["versions"] == [3, 3, 3]
    assert window["sampler_logprobs"] == [-0.5, -0.5, -0.5]
    assert (window["total"], window["advantages"], window["logprobs"]) == (6, None, None)
    assert httpx.get(f"{url}{path}/batches/1/groups/9").status_code == 404
    assert httpx.get(f"{url}{path}/batches/7/groups/0").status_code == 404
    assert httpx.get(f"{url}{path}/batches/1/groups/0/samples/4").status_code == 422


@pytest.mark.parametrize("number", [int, float])
def test_what_the_trainer_says_of_tokens_is_shown_at_their_places(client, url, number):
    """Some clients write every number as `1.0`."""
    run = begin_with_a_batch(client)
    values = {
        "positions": [number(1), number(2), number(4)],
        "advantages": [0.5, 0.5, 0.5],
        "logprobs": [-0.1, None, -0.3],
        "entropies": [1, 2, 3],
    }
    groups = [{"group": number(1), "samples": [None, values, None, None]}]
    body = {"groups": groups, "texts": {"51": " is", "999": "x"}}
    answer = httpx.put(f"{url}/v1/runs/{run.run_id}/batches/1/tokens", json=body)
    assert answer.status_code == 204
    path = f"/v1/runs/{run.run_id}/batches/1/groups/1/samples"
    window = get(url, f"{path}/1")
    assert window["advantages"] == [None, 0.5, 0.5, None, 0.5, None]
    assert window["logprobs"] == [None, -0.1, None, None, -0.3, None]
    assert get(url, f"{path}/0")["texts"] == {"51": " is"}
    assert get(url, f"{path}/0")["logprobs"] is None


def test_a_ranks_report_is_about_its_own_slice_of_the_batch(client, url):
    run = begin_with_a_batch(client)
    values = {"positions": [1], "advantages": [7.0], "logprobs": [-0.1]}
    for rank in (0, 1):
        body = {
            "rank": rank,
            "world_size": 2,
            "groups": [{"group": 0, "samples": [values | {"advantages": [float(rank)]}]}],
        }
        assert httpx.put(f"{url}/v1/runs/{run.run_id}/batches/1/tokens", json=body).status_code == 204
    path = f"/v1/runs/{run.run_id}/batches/1/groups"
    assert [get(url, f"{path}/{group}/samples/0")["advantages"][1] for group in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("order", "expected"), [("lowest-reward", [-9.0, 0.0]), ("highest-reward", [0.0, -9.0]), ("newest", [-9.0, 0.0])]
)
def test_groups_are_found_by_reward_and_environment(client, url, order, expected):
    run = begin_with_a_batch(client, scores=[-9.0, 0.0, 0.0, 1.0])
    listed = get(url, f"/v1/runs/{run.run_id}/groups", order=order)
    assert [min(one["rewards"]) for one in listed["groups"]] == expected
    assert get(url, f"/v1/runs/{run.run_id}/groups", environment_id=0, limit=1)["total"] == 2
    assert get(url, f"/v1/runs/{run.run_id}/groups", environment_id=7)["total"] == 0
    assert get(url, f"/v1/runs/{run.run_id}/groups", batch=2)["total"] == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [("lowest-reward", ["wrong", "mixed", "new", "old"]), ("highest-reward", ["new", "old", "mixed", "wrong"])],
)
def test_groups_with_the_same_lowest_and_highest_reward_are_ordered_by_mean_then_the_newest_first(
    client, url, order, expected
):
    rewards = {"old": [1, 1, 1, 0], "wrong": [0, 0, 0, 0.5], "mixed": [1, 0, 0, 0], "new": [0, 1, 1, 1]}
    run = client.begin_run(RUN)
    request = EnvironmentRequest(name="e", group_size=4, max_token_length=999)
    environment = client.register_environment(request).environment_id
    for number, (name, scores) in enumerate(rewards.items()):
        group = make_group(4, 6, first_token=number, scores=[float(one) for one in scores])
        client.submit(environment, [group], idempotency_key=name)
    listed = get(url, f"/v1/runs/{run.run_id}/groups", order=order, batch=0)["groups"]
    assert [next(name for name, scores in rewards.items() if scores == one["rewards"]) for one in listed] == expected


@pytest.mark.parametrize("form", ["columns", "json"])
def test_groups_are_found_by_what_is_remarked_about_their_sequences(url, form):
    failed = {"finish_reason": "length", "error": "the tool timed out"}
    marks = [{"absent": True}, failed, None, {"finish_reason": "stop"}]
    with BrokerClient(url, form=form) as client:
        run = begin_with_a_batch(client)
        client.submit(0, [make_group(4, 6, overrides=marks)], idempotency_key="marked")
    path = f"/v1/runs/{run.run_id}/groups"
    (marked,) = get(url, path, only="remarked")["groups"]
    assert (marked["batch"], marked["remarks"]) == (0, {"absent": 1, "length": 1, "the tool timed out": 1})
    assert [get(url, path, only=only)["total"] for only in ("all", "mixed", "equal", "failed")] == [3, 3, 0, 3]
    assert get(url, path, only="mixed", limit=1)["total"] == 3
    assert httpx.get(f"{url}{path}", params={"only": "broken"}).status_code == 422


def test_queued_groups_and_those_of_batches_in_the_store_can_be_looked_at(client, url):
    run = begin_with_a_batch(client)
    client.submit(0, [make_group(4, 6, first_token=200)], idempotency_key="queued")
    (queued,) = get(url, f"/v1/runs/{run.run_id}/groups", batch=0)["groups"]
    window = get(url, f"/v1/runs/{run.run_id}/batches/0/groups/{queued['group']}/samples/0")
    assert window["tokens"][0] == 200


def test_the_newest_batches_take_a_bounded_amount_of_memory():
    with served_broker(recent_bytes=20_000) as url, BrokerClient(url) as client:
        run = client.begin_run(RUN)
        environment = client.register_environment(
            EnvironmentRequest(name="e", group_size=4, max_token_length=999)
        ).environment_id
        for number in range(1, 9):
            groups = [make_group(4, 200, first_token=number), make_group(4, 200, first_token=9000 + number)]
            client.submit(environment, groups, idempotency_key=str(number))
            client.get_batch(number, run_id=run.run_id, epoch=run.epoch)
            client.commit(number, run_id=run.run_id, epoch=run.epoch)
        batches = {one["batch"] for one in get(url, f"/v1/runs/{run.run_id}/groups")["groups"]}
        assert 8 in batches
        assert 1 not in batches


@pytest.mark.parametrize("rule", STALLS)
def test_a_planted_stall_is_named_on_its_edge_within_ten_seconds(client, url, rule):
    plant, edge = STALLS[rule]
    with stalled_run(client) as stalled, plant(stalled):
        deadline = time.monotonic() + NAMED_WITHIN_SECONDS
        found = {}
        while time.monotonic() < deadline and found.get("rule") != rule:
            found = client.status()["flow"]["diagnosis"]["finding"]
            time.sleep(0.2)
        assert (found["rule"], found["edge"]) == (rule, edge), found
        assert found["headline"]
        deadline = time.monotonic() + 30
        while (blocked := blocked_edges(url)) != {edge} and time.monotonic() < deadline:
            time.sleep(0.2)
        assert blocked == {edge}, "a gauge for alerts says the same"


def blocked_edges(url):
    """Return the edges on which /metrics says that the run is blocked; None without an open run."""
    found = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if "run_blocked{" in line]
    values = {name.split('"')[1]: float(value) for name, value in found}
    assert len(values) in {0, 4}
    return {edge for edge, value in values.items() if value} if values else None


def test_without_an_open_run_none_is_blocked(client, url):
    assert blocked_edges(url) is None
    run = client.begin_run(RUN)
    assert blocked_edges(url) == set()
    client.finish_run(run.run_id, epoch=run.epoch)
    assert blocked_edges(url) is None


def test_a_stall_reaches_a_watcher_although_nothing_happens(client, url):
    with (
        stalled_run(client) as stalled,
        STALLS["straggler"][0](stalled),
        httpx.stream("GET", f"{url}/v1/events", timeout=20) as stream,
    ):
        deadline = time.monotonic() + NAMED_WITHIN_SECONDS
        for line in stream.iter_lines():
            if line.startswith("data: ") and '"flow"' in line:
                finding = json.loads(line.removeprefix("data: "))["flow"]["diagnosis"]["finding"]
                if finding["rule"] == "straggler" and finding["severity"] == "blocked":
                    break
            assert time.monotonic() < deadline
        else:
            pytest.fail("the stream ended without telling the stall")


def test_a_watcher_without_a_stream_is_told_if_anything_happened(client, url):
    first = httpx.get(f"{url}/v1/status")
    tag = first.headers["etag"]
    assert httpx.get(f"{url}/v1/status", headers={"If-None-Match": tag}).status_code == 304
    client.begin_run(RUN)
    changed = httpx.get(f"{url}/v1/status", headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    assert changed.json()["run"]["name"] == "watched"


def test_rates_are_differences_of_counts_over_time(client, url):
    run = client.begin_run(RUN)
    environment = client.register_environment(
        EnvironmentRequest(name="e", group_size=4, max_token_length=9)
    ).environment_id
    began = time.monotonic()
    assert client.status()["flow"]["rates"] is None
    client.submit(environment, [make_group(4, 4)], idempotency_key="a")
    time.sleep(1.1)
    rates = client.status()["flow"]["rates"]
    assert 0.9 / (time.monotonic() - began) < rates["groups"] <= 1.0
    assert rates["sequences"] == pytest.approx(4 * rates["groups"])
    assert run.run_id


def test_two_runs_are_listed_the_newest_first(client, url):
    first = client.begin_run(RUN)
    report(url, first, [(1, {"a": 1.0})])
    client.finish_run(first.run_id, epoch=first.epoch)
    second = client.begin_run(msgspec.structs.replace(RUN, name="second"))
    listed = get(url, "/v1/runs")["runs"]
    assert [(one["run_id"], one["state"], one["has_metrics"]) for one in listed] == [
        (second.run_id, "open", False),
        (first.run_id, "finished", True),
    ]


def test_a_batch_that_was_saved_has_a_command_that_trains_it_again(client, url):
    run = client.begin_run(msgspec.structs.replace(RUN, batches_dir="/runs/my run/rollouts"))
    client.register_environment(EnvironmentRequest(name="e", group_size=4, max_token_length=9))
    client.submit(0, [make_group(4, 4), make_group(4, 4, first_token=90)], idempotency_key="a")
    client.get_batch(1, run_id=run.run_id, epoch=run.epoch)
    document = get(url, f"/v1/runs/{run.run_id}/batches/1/groups/0")
    assert document["replay"] == "atropos replay '/runs/my run/rollouts/batch-1.atb'"


def test_the_application_for_tests_watches_too():
    assert make_memory_app().context.shared_status().etag


def test_the_first_status_of_a_stream_has_what_has_just_happened(client, url):
    next(watch_events(url))
    for number in range(20):
        client.begin_run(msgspec.structs.replace(RUN, name=f"run {number}", take_over=True))
        assert next(watch_events(url)).data["run"]["name"] == f"run {number}"
