"""A run that is observed in every way: traces from item to step, JSON logs, and metrics of all four programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from example_trainer.processes.ports import free_ports, holder
from tests.collector import Collector, collecting_http

from .conftest import ROOT, Launched

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 6
AS_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|(INFO|WARNING|ERROR) \d\d-\d\d ")
"""The beginning of a record that our text form, or vLLM's, has written."""

PROGRAMS = ("broker", "environment", "trainer", "vllm")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_http() as found:
        yield found


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """The port of each program; the environment's is the one after the trainer's.

    These two are below those that the kernel gives out by itself: it once gave the second to somebody's connection
    before the environment listened there.
    """
    with ExitStack() as held:
        broker, vllm = free_ports(2, held=held)
        trainer = next(port for port in range(21_000, 32_000, 2) if holder(port) is None and holder(port + 1) is None)
        yield {"trainer": trainer, "environment": trainer + 1, "broker": broker, "vllm": vllm}


@pytest.fixture
def run(start_launcher: Callable[..., Launched], collector: Collector, ports: dict[str, int]) -> Launched:
    return start_launcher(
        *(sys.executable, "-m", "example_trainer.run", "--config", str(ROOT / "configs/demo.yaml")),
        *("--training-steps", str(STEPS), "--env.eval_at_start", "false", "--env.eval_at_end", "false"),
        *("--log-format", "json", "--otlp-traces-endpoint", collector.endpoint),
        *("--metrics-port", str(ports["trainer"]), "--api.port", str(ports["broker"])),
        *("--vllm-port", str(ports["vllm"])),
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
    )


def metrics_of(port: int) -> dict[str, Any]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", follow_redirects=True).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_run_is_seen_from_the_item_to_the_step(run: Launched, collector: Collector, ports: dict[str, int]) -> None:
    run.wait_for_steps(2, limit_seconds=400)
    families = {program: metrics_of(port) for program, port in ports.items()}
    code, _, error = run.end(300)
    assert code == 0, error + run.logs()
    check_metrics(families)
    check_logs(run.run_dir)
    check_traces(collector)


def check_metrics(families: dict[str, dict[str, Any]]) -> None:
    for program, found in families.items():
        assert found["atropos_build_info"].samples, program
        assert found["process_resident_memory_bytes"].samples[0].value > 2**24, program
    assert families["trainer"]["atropos_trainer_steps"].samples[0].value >= 2
    assert families["environment"]["atropos_environment_groups_sent"].samples[0].value >= 2
    assert families["broker"]["atropos_batches_formed"].samples[0].value >= 2
    server = families["vllm"]
    assert server["atropos_server_policy_version"].samples[0].value >= 1
    fence = {sample.name: sample.value for sample in server["atropos_server_fence_seconds"].samples}
    assert fence["atropos_server_fence_seconds_count"] >= 1
    assert fence["atropos_server_fence_seconds_sum"] > 0
    assert server["vllm:generation_tokens"].samples[0].value > 0
    dashboard = (ROOT / "deploy/grafana/atropos.json").read_text(encoding="utf-8")
    drawn = set(re.findall(r"vllm:\w+", dashboard))
    assert drawn
    assert drawn <= {sample.name for family in server.values() for sample in family.samples}


def check_logs(run_dir: Path) -> None:
    """Every record is a JSON object, and those of the work tell run, step and version.

    torch prints a few lines past Python's logging.
    """
    told: dict[str, set[str]] = {}
    for program in PROGRAMS:
        lines = (run_dir / "logs" / "latest" / f"{program}.log").read_text().splitlines()
        assert [line for line in lines if AS_TEXT.match(line)] == [], program
        records = [json.loads(line) for line in lines if line.startswith("{")]
        assert records, program
        told[program] = set().union(*(record.keys() for record in records))
        assert {"time", "level", "program", "logger", "event"} <= told[program], program
    assert {"run", "run_id", "step", "policy_version"} <= told["trainer"]
    assert {"run_id", "step", "policy_version", "environment"} <= told["environment"]


def check_traces(collector: Collector) -> None:
    spans = {span.span: span for span in collector.spans}
    own = [span for span in collector.named("step") if not span.parent]
    assert sorted(span.attributes["atropos.step"] for span in own) == list(range(1, STEPS + 1))
    for name in ("fetch", "train", "publish"):
        assert {span.parent for span in collector.named(name)} <= {span.span for span in own}
        assert len(collector.named(name)) >= STEPS - 1
    reached = [span for span in collector.named("step") if span.parent]
    assert reached
    for step in reached:
        group = spans[step.parent]
        rollout = spans[group.parent]
        (batch,) = [span for span in collector.named("batch") if span.parent == group.span]
        assert (group.name, rollout.name, rollout.parent) == ("group", "rollout", "")
        assert len({span.trace for span in (step, batch, group, rollout)}) == 1
        assert batch.attributes["atropos.batch"] == step.attributes["atropos.step"]
        (trained_in,) = step.links
        assert spans[trained_in].attributes["atropos.step"] == step.attributes["atropos.step"]
        assert group.span in spans[trained_in].links
        assert rollout.began_at <= batch.began_at <= step.began_at <= step.ended_at
    served = [span for span in collector.named("llm_request") if span.parent in spans]
    assert served, "vLLM continued no trace"
    assert {spans[span.parent].name for span in served} == {"inference"}
    assert {span.service for span in reached} == {"atropos-trainer"}
