"""Metrics for Prometheus keep its conventions, and a program without a server of its own can serve them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from atropos_api.common.prometheus import (
    PROCESS_METRICS,
    Metric,
    MetricsEndpoint,
    MetricsPortUnusable,
    serving_metrics,
)
from atropos_api.routes import metrics as broker
from environments.sdk.runtime import metrics as environment
from example_trainer.monitoring import prometheus as trainer
from example_trainer.serving import metrics as server

TABLES = {
    "broker": broker.METRICS,
    "environment": environment.METRICS,
    "server": server.METRICS,
    "trainer": (*trainer.COUNTERS, *(trainer.spell(name).metric for name in trainer.templates())),
    "process": PROCESS_METRICS,
}
WEIGHTS = Metric("weights", "gauge", "Weight by place", ("place",))


@pytest.mark.parametrize("table", TABLES)
def test_names_are_unique_and_in_base_units_and_only_counters_end_in_total(table: str) -> None:
    names = [metric.name for metric in TABLES[table]]
    assert len(set(names)) == len(names)
    for metric in TABLES[table]:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name), metric.name
        assert not re.search(r"_(ms|minutes|gb|gib|mb|mib|kb|percent)(_|$)", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.meaning, metric.name


def collect() -> Iterator[Family]:
    yield WEIGHTS.family("t_", (('a"b\\c\n',), 1.5), (("here",), 2))


def test_an_endpoint_serves_a_program_s_metrics_and_those_of_its_process() -> None:
    endpoint = MetricsEndpoint(collect, host="127.0.0.1", port=0)
    try:
        answer = httpx.get(f"http://127.0.0.1:{endpoint.port}/metrics")
    finally:
        endpoint.close()
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    samples = [(sample.labels["place"], sample.value) for sample in families["t_weights"].samples]
    assert samples == [('a"b\\c\n', 1.5), ("here", 2.0)]
    assert families["process_resident_memory_bytes"].samples[0].value > 2**20
    assert families["atropos_build_info"].samples[0].value == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{endpoint.port}/metrics")


def test_a_port_that_is_taken_is_one_line_that_names_it() -> None:
    endpoint = MetricsEndpoint(collect, host="127.0.0.1", port=0)
    try:
        with pytest.raises(MetricsPortUnusable, match=f"metrics_port {endpoint.port}: .*in use; choose another port"):
            MetricsEndpoint(collect, host="127.0.0.1", port=endpoint.port)
    finally:
        endpoint.close()


def test_without_a_port_nothing_is_served() -> None:
    def never() -> Iterator[Family]:
        raise AssertionError

    with serving_metrics(never, "no.such.host.invalid", None):
        pass
