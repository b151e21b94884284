"""Dropped groups are counted by environment and reason, and shown in every status."""

import logging

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.testing import make_group, make_memory_app, serve_in_thread
from atropos_api.wire import DropReport, EnvironmentRequest, PolicyUpdate, RunRequest


@pytest.fixture
def url():
    with serve_in_thread(make_memory_app()) as served:
        yield served


@pytest.fixture
def client(url):
    with BrokerClient(url) as client:
        yield client


def register(client, name="env", size=4):
    request = EnvironmentRequest(name=name, group_size=size, max_token_length=9)
    return client.register_environment(request).environment_id


def report(session="s", explanation="", **groups):
    return DropReport(
        session=session,
        groups={name.replace("_", "-"): count for name, count in groups.items()},
        explanation=explanation,
    )


def shown(client, environment_id):
    return next(row for row in client.status()["environments"] if row["environment_id"] == environment_id)


def counted(url):
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    (family,) = [family for family in families if family.name == "atropos_groups_dropped"]
    return {(sample.labels["environment"], sample.labels["reason"]): sample.value for sample in family.samples}


def test_what_an_environment_drops_is_in_status_and_metrics_with_its_own_words(url, client):
    one, other = register(client, "one"), register(client, "other")
    client.report_dropped(one, report(equal_scores=96, too_long=4, explanation="100 groups scored, all dropped"))
    client.report_dropped(other, report(equal_scores=1))
    assert shown(client, one)["dropped_groups"] == {"equal-scores": 96, "too-long": 4}
    assert shown(client, one)["latest_drop"]["explanation"] == "100 groups scored, all dropped"
    assert client.status()["dropped_groups"] == {"equal-scores": 97, "too-long": 4}
    assert counted(url) == {("one", "equal-scores"): 96, ("one", "too-long"): 4, ("other", "equal-scores"): 1}


def test_reports_may_come_twice_or_late_and_restarted_environments_count_on(client):
    one = register(client)
    for groups in ({"equal_scores": 8}, {"equal_scores": 8}, {"equal_scores": 20}, {"equal_scores": 8}):
        client.report_dropped(one, report(**groups))
    assert shown(client, one)["dropped_groups"] == {"equal-scores": 20}
    client.report_dropped(one, report(session="another process", equal_scores=5))
    assert shown(client, one)["dropped_groups"] == {"equal-scores": 25}


def test_a_report_of_an_unknown_environment_or_of_nonsense_is_refused(url, client):
    with pytest.raises(BrokerRefused, match="no environment has the id 9"):
        client.report_dropped(9, report(failed=1))
    one = register(client)
    for groups in ({"x": -1}, {"": 1}, {str(n): 1 for n in range(40)}):
        answer = httpx.put(f"{url}/v1/environments/{one}/dropped", json={"session": "s", "groups": groups})
        assert answer.status_code == 422, groups


def test_groups_that_the_broker_drops_are_counted_for_their_environment_and_logged(client, caplog):
    caplog.set_level(logging.WARNING)
    one = register(client)
    run = client.begin_run(RunRequest(name="r", batch_size=4, max_token_length=9, num_steps=9, max_staleness=0))
    numbers = {"run_id": run.run_id, "epoch": run.epoch}
    for step in range(3):
        client.update_policy(PolicyUpdate(version=step, step=step, published_at=0.0, **numbers))
    client.submit(one, [make_group(version=0), make_group(first_token=50, version=0)], idempotency_key="old")
    assert client.get_batch(1, wait_seconds=0, **numbers) is None
    assert shown(client, one)["dropped_groups"] == {"too-old": 2}
    assert "--max-staleness" in shown(client, one)["latest_drop"]["explanation"]
    assert "groups dropped so far as too-old: 2" in caplog.text


def test_a_group_that_an_atropos_client_is_refused_is_counted(url, client):
    answer = httpx.post(f"{url}/scored_data", json={"tokens": [[1]], "masks": [[1]], "scores": ["x"]})
    assert answer.status_code == 422
    answer = httpx.post(f"{url}/scored_data_list", json=[{"tokens": [[1]], "masks": [[1]], "scores": ["x"]}])
    assert answer.status_code == 422
    assert client.status()["dropped_groups"] == {"refused": 2}


def test_senders_that_are_not_registered_are_counted_together(url, client):
    """Their groups have no environment's name: Prometheus takes one sample of a name, and drops a second one."""
    run = client.begin_run(RunRequest(name="run", batch_size=8, max_token_length=9, num_steps=0, max_staleness=0))
    for env_id in (77, 78):
        group = msgspec.structs.replace(make_group(4), env_id=env_id, policy_versions=[[(0, 1, 1)]] * 4)
        assert httpx.post(f"{url}/scored_data", content=msgspec.json.encode(group)).status_code == 200
    for version in (1, 3):
        client.update_policy(PolicyUpdate(run_id=run.run_id, version=version, step=version, published_at=0.0))
    assert counted(url) == {("", "too-old"): 2}
    text = httpx.get(f"{url}/metrics").text
    assert text.count('atropos_groups_dropped_total{environment="",reason="too-old"}') == 1
