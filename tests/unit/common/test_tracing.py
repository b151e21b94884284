"""Traces are off and cost no import until an endpoint is set; then each span reaches the collector once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from atropos_api.common import tracing as tracing_module
from atropos_api.common.tracing import (
    NO_SPAN,
    TracesUnavailable,
    current_span,
    open_tracing,
    running,
    traceparent_of,
)
from tests.collector import Collector, collecting_grpc, collecting_http

TRACEPARENT = f"00-{'4b' * 16}-{'a1' * 8}-01"
FOREIGN = "opentelemetry"


def test_off_nothing_is_recorded_and_every_span_is_the_same_one() -> None:
    tracing = open_tracing(None, service="me")
    with running(tracing.begin("rollout", item=1)) as span, span.child("inference") as child:
        child.set(tokens=3)
        child.link([TRACEPARENT])
    assert not tracing.is_on
    assert span is child is current_span() is NO_SPAN
    assert span.traceparent is None


@pytest.mark.parametrize(
    "module", ["atropos_api.server.serve", "environments.sdk.runtime.worker", "example_trainer.cli"]
)
def test_no_program_imports_opentelemetry_by_itself(module: str) -> None:
    check = f"import sys, {module}; sys.exit(any(name.startswith({FOREIGN!r}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=120).returncode == 0


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atropos_api.common.otel", None)
    with pytest.raises(TracesUnavailable, match=r"pip install 'atropos-grpo\[otel\]', or leave the option out"):
        open_tracing("http://localhost:4317", service="me")


@pytest.mark.parametrize(("protocol", "collecting"), [("grpc", collecting_grpc), ("http/protobuf", collecting_http)])
def test_a_trace_arrives_whole(
    protocol: str, collecting: Callable[[], AbstractContextManager[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with collecting() as collector:
        tracing = open_tracing(collector.endpoint, service="me")
        handed_on = ""

        def roll_out() -> None:
            nonlocal handed_on
            with running(tracing.begin("rollout", step=3)) as rollout:
                with rollout.child("inference"):
                    assert current_span().traceparent != rollout.traceparent
                handed_on = rollout.traceparent or ""
                raise KeyError("planted")

        with pytest.raises(KeyError):
            roll_out()
        assert current_span() is NO_SPAN
        at = time.time() - 5
        far = tracing.begin("step", parent=handed_on, at_seconds=at, batch=7)
        far.link([TRACEPARENT])
        far.end()
        tracing.close()
    by_name = {span.name: span for span in collector.spans}
    assert len(collector.spans) == len(by_name) == 3
    rollout_seen, inference, step = by_name["rollout"], by_name["inference"], by_name["step"]
    assert rollout_seen.parent == ""
    assert rollout_seen.failed
    assert {inference.parent, step.parent} == {rollout_seen.span}
    assert len({span.trace for span in collector.spans}) == 1
    assert handed_on.startswith(f"00-{rollout_seen.trace}-{rollout_seen.span}-")
    assert (step.attributes["atropos.batch"], rollout_seen.attributes["atropos.step"]) == (7, 3)
    assert step.links == {"a1" * 8}
    assert step.began_at == pytest.approx(at, abs=1e-3)
    assert {span.service for span in collector.spans} == {"me"}


def test_the_sampler_of_opentelemetry_s_variable_decides_for_the_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collecting_http() as collector:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        off = open_tracing(collector.endpoint, service="me")
        with running(off.begin("rollout")) as rollout:
            handed_on = rollout.traceparent
        off.close()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        on = open_tracing(collector.endpoint, service="me")
        on.begin("step", parent=handed_on).end()
        on.begin("own").end()
        on.close()
    assert [span.name for span in collector.spans] == ["own"]


def test_a_collector_that_does_not_answer_delays_the_end_by_a_few_seconds_at_most() -> None:
    tracing = open_tracing("http://127.0.0.1:9", service="me")
    tracing.begin("rollout").end()
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"traceparent": TRACEPARENT}, TRACEPARENT),
        ({"traceparent": 3}, None),
        ({"traceparent": "00-zz"}, None),
        ({"traceparent": TRACEPARENT + "\nx"}, None),
    ],
)
def test_a_group_s_traceparent_is_read_only_if_it_is_one(
    params: dict[str, object] | None, expected: str | None
) -> None:
    assert traceparent_of(params) == expected
    assert tracing_module.FIELD == "traceparent"
