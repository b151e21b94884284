"""Monitoring works: event streams resume, watchers cost nothing, and Prometheus reads the metrics."""

import contextlib
import itertools
import json
import platform
import re
import socket
import time

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atropos_api.broker.counters import Counters
from atropos_api.broker.state import EventLog
from atropos_api.client import BrokerClient
from atropos_api.common.identity import package_version
from atropos_api.common.prometheus import PROCESS_METRICS
from atropos_api.routes import ops as events_module
from atropos_api.routes.metrics import COUNTERS, METRICS, PREFIX
from atropos_api.store.memory import MemoryLedger
from atropos_api.testing import make_group, make_memory_app, serve_in_thread
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest

RUN = RunRequest(name="watched", batch_size=4, max_token_length=9, num_steps=3)


@pytest.fixture
def app():
    return make_memory_app(stall_timeout=0.6)


@pytest.fixture
def url(app):
    with serve_in_thread(app) as served:
        yield served


@pytest.fixture
def client(url):
    with BrokerClient(url) as client:
        yield client


@contextlib.contextmanager
def watch(url, **headers):
    with httpx.stream("GET", f"{url}/v1/events", headers=headers, timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield read_events(response.iter_lines())


def read_events(lines):
    event = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            event[name] = value
        else:
            if "event" in event:
                yield event
            event = {}


def until_status(events):
    seen = [next(events)]
    while seen[-1]["event"] != "status":
        seen.append(next(events))
    return seen


def test_a_watcher_sees_what_happens_and_the_whole_status_after_it(client, url):
    with watch(url) as events:
        assert json.loads(until_status(events)[-1]["data"])["run"] is None
        client.begin_run(RUN)
        kinds = until_status(events)
        assert [event["event"] for event in kinds] == ["run-began", "status"]
        assert json.loads(kinds[-1]["data"])["run"]["name"] == "watched"
        assert int(kinds[0]["id"]) <= int(kinds[1]["id"])


def test_a_watcher_that_comes_back_gets_what_it_missed_once(client, url):
    run = client.begin_run(RUN)
    with watch(url) as events:
        last = until_status(events)[-1]["id"]
    for version in (1, 2):
        update = PolicyUpdate(run_id=run.run_id, version=version, step=version, published_at=time.time())
        client.update_policy(update)
    with watch(url, **{"Last-Event-ID": last}) as events:
        seen = until_status(events)
    assert [event["event"] for event in seen] == ["policy", "policy", "status"]
    assert [json.loads(event["data"])["version"] for event in seen[:2]] == [1, 2]


@pytest.mark.parametrize("last", ["1", "999999999999999999"])
def test_a_watcher_that_comes_back_too_late_is_told_when_and_from_where_on(url, last):
    with watch(url, **{"Last-Event-ID": last}) as events:
        missed = until_status(events)[0]
    data = json.loads(missed["data"])
    assert (missed["event"], data["after"]) == ("missed", int(last))
    assert abs(data["time"] - time.time()) < 60


def test_the_ring_of_events_is_bounded_and_knows_what_it_forgot():
    log = EventLog(MemoryLedger(), lambda: 1.0, capacity=3)
    start = log.last_id
    for number in range(5):
        log.add("e", number=number)
    assert [event.data["number"] for event in log.after(0)] == [2, 3, 4]
    assert log.has_forgotten(start + 1)
    assert not log.has_forgotten(start + 2)
    assert not log.has_forgotten(log.last_id)
    assert log.has_forgotten(log.last_id + 1)


def test_silence_is_filled_with_the_status_whose_durations_go_on(url, client, monkeypatch):
    monkeypatch.setattr(events_module, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(events_module, "DIAGNOSIS_SECONDS", 0.1)
    client.register_environment(EnvironmentRequest(name="silent", group_size=4, max_token_length=9))
    quiet = []
    with httpx.stream("GET", f"{url}/v1/events", timeout=10) as response:
        # A stream of comments alone has no event, and would not end.
        for event in read_events(itertools.islice(response.iter_lines(), 200)):
            assert event["event"] == "status"
            quiet.append(json.loads(event["data"])["environments"][0]["quiet_seconds"])
            if quiet[-1] > quiet[0]:
                break
    assert quiet[-1] > quiet[0], quiet


def test_a_watcher_that_never_reads_is_dropped_while_others_are_served(app, url, client):
    host, port = url.removeprefix("http://").split(":")
    log = app.context.broker.state.events
    for _ in range(1900):
        log.add("filler", text="x" * 4000)
    with socket.socket() as watcher:
        watcher.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        watcher.connect((host, int(port)))
        watcher.sendall(b"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 8
        with pytest.raises(ConnectionError):  # noqa: PT012
            while time.monotonic() < deadline:
                watcher.sendall(b"\r\n")
                assert client.status()["run"] is None
                time.sleep(0.05)


def test_metrics_are_explained_and_read_by_prometheus(client, url):
    run = client.begin_run(RUN)
    client.update_policy(PolicyUpdate(run_id=run.run_id, version=5, step=0, published_at=time.time()))
    request = EnvironmentRequest(name='en"v\\\n', group_size=4, max_token_length=9)
    environment = client.register_environment(request).environment_id
    for ident in range(3):
        client.submit(environment, [make_group(4, 4, version=5)], idempotency_key=str(ident))
    assert client.get_batch(1, run_id=run.run_id, epoch=run.epoch) is not None
    client.get_batch(2, run_id=run.run_id, epoch=run.epoch)
    text = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert values["atropos_policy_version"] == 5
    assert values["atropos_staleness_max"] == 1
    assert values["atropos_queued_groups"] == 1
    assert values["atropos_batches_formed"] == 2
    (sample,) = families["atropos_environment_queued_sequences"].samples
    assert sample.labels == {"environment": 'en"v\\\n'}
    assert values["atropos_ready"] == 1
    assert 0 <= values["atropos_trainer_quiet_seconds"] < 5
    explained = {f"{PREFIX}{metric.name}" for metric in METRICS} | {metric.name for metric in PROCESS_METRICS}
    assert set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE)) == explained


def test_the_process_is_measured_by_the_names_that_prometheus_clients_use(url):
    families = {family.name: family for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}
    (build,) = families["atropos_build_info"].samples
    assert build.labels == {"version": package_version(), "python": platform.python_version()}
    values = {name: family.samples[0].value for name, family in families.items() if name.startswith("process_")}
    process = psutil.Process()
    assert values["process_resident_memory_bytes"] == pytest.approx(process.memory_info().rss, rel=0.2)
    assert 0 < values["process_cpu_seconds"] <= sum(process.cpu_times()[:2])
    assert 0 < values["process_open_fds"] <= values["process_max_fds"]
    assert values["process_start_time_seconds"] == pytest.approx(process.create_time(), abs=1)


def test_every_counter_is_explained():
    assert set(COUNTERS) == set(Counters.__slots__)
