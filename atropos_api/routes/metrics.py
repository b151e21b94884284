"""`/metrics` in Prometheus' text form: the broker's own counts, and the process's version and resource use.

The metrics of the process have the names that Prometheus' own clients use.
"""

from __future__ import annotations

import functools
import platform
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

import psutil
from fastapi import APIRouter, Request, Response

from atropos_api.broker import Broker
from atropos_api.broker.queue import version_of
from atropos_api.broker.runs import quiet_seconds
from atropos_api.common import metric_names
from atropos_api.http.context import AppContext, context_of
from atropos_api.routes.schema import TEXT, TEXT_SCHEMA, Answer, Operation
from atropos_api.store.base import RunRow

router = APIRouter(tags=["operations"])

route = functools.partial(Operation, router)

PREFIX: Final = "atropos_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

COUNTER_HELP: Final = {
    "groups_received_total": "Groups that were accepted",
    "sequences_received_total": "Sequences that were accepted",
    "tokens_received_total": "Tokens that were accepted",
    "groups_duplicate_total": "Repeats of accepted groups that were recognised",
    "groups_refused_total": "Groups that no trainer could use",
    "groups_expired_total": "Groups dropped because they would have been too old when trained",
    "groups_orphaned_total": "Groups of policies that a resumed run discarded",
    "groups_without_version_total": "Groups without the policy versions of their tokens",
    "groups_unregistered_total": "Groups of environments that are not registered",
    "groups_unpackable_total": "Groups of a size that no batch of the run can hold",
    "groups_left_over_total": "Groups that a run which ended did not train",
    "groups_lost_total": "Groups that were damaged on the disk",
    "batches_formed_total": "Batches that were formed",
    "batches_handed_total": "Batches that were handed out, each counted once",
    "batches_committed_total": "Batches that a checkpoint covers",
    "minima_waived_total": "Batches formed without some environment's minimum",
    "publishes_while_held_total": "Policies published although an evaluation held the one before",
    "pressure_total": "Submissions answered 503 because the queue was full",
    "store_failures_total": "Writes that the store refused",
}

GAUGE_HELP: Final = {
    "ready": "1 while the broker is ready for submissions, as at /readyz",
    "queued_groups": "Groups that wait for a batch",
    "queued_sequences": "Sequences that wait for a batch",
    "queued_bytes": "Bytes of the groups that wait for a batch",
    "queue_oldest_age_seconds": "Age of the group that has waited longest",
    "store_bytes": "Bytes that the store holds",
    "uncommitted_batches": "Batches formed and not covered by a checkpoint",
    "environments_alive": "Environments that called recently",
    "outstanding_sequences": "Sequences queued, or in batches not trained yet",
    "unpackable_groups": "Groups queued that no batch of the run can hold",
    "trainer_quiet_seconds": "Time since the last call of the open run's trainer",
    "policy_held_seconds": "Time for which evaluations ask that no other policy be published",
    "step": "Trainer steps of the open run",
    "policy_version": "The version of the published policy",
    "staleness_mean": "Trainer steps between policy and training, over the groups of the newest batch",
    "staleness_max": "The same, of its oldest group",
    "environment_queued_sequences": "Sequences of one environment that wait for a batch",
}

DROPPED: Final = "groups_dropped_total"
DROPPED_HELP: Final = "Groups that were dropped instead of trained, by environment and reason"


@route(
    "GET /metrics",
    "Counters and gauges for Prometheus",
    answers={200: Answer(help="Counters and gauges in Prometheus' text form", content=TEXT_SCHEMA, media_type=TEXT)},
)
async def metrics(request: Request) -> Response:
    return Response("".join(_render(context_of(request))), media_type=CONTENT_TYPE)


def _render(context: AppContext) -> Iterator[str]:
    broker = context.broker
    yield from render_process(context.version)
    yield from _series("ready", GAUGE_HELP["ready"], "gauge", [("", context.why_not_ready() is None)])
    for name, value in asdict(broker.state.counters).items():
        yield from _series(name, COUNTER_HELP[name], "counter", [("", value)])
    for name, value in _gauges(broker).items():
        yield from _series(name, GAUGE_HELP[name], "gauge", [("", value)])
    yield from _series(DROPPED, DROPPED_HELP, "counter", _dropped(broker))
    queued = [
        (
            f'{{environment="{_escape(row.display_name)}"}}',
            broker.state.queue.sequences_by_env.get(row.environment_id, 0),
        )
        for row in broker.state.environments
    ]
    name = "environment_queued_sequences"
    yield from _series(name, GAUGE_HELP[name], "gauge", queued)


def _dropped(broker: Broker) -> list[tuple[str, float]]:
    rows: dict[int | None, str] = {row.environment_id: row.display_name for row in broker.state.environments}
    return [
        (f'{{environment="{_escape(rows.get(environment_id, ""))}",reason="{_escape(reason)}"}}', count)
        for environment_id, reason, count in broker.state.drops
    ]


def _gauges(broker: Broker) -> dict[str, float]:
    state = broker.state
    oldest = state.queue.oldest()
    gauges: dict[str, float] = {
        "queued_groups": state.queue.groups,
        "queued_sequences": state.queue.sequences,
        "queued_bytes": state.queue.body_bytes,
        "queue_oldest_age_seconds": state.clock() - oldest.arrived_at if oldest is not None else 0.0,
        "store_bytes": state.bodies.size_bytes(),
        "uncommitted_batches": len(state.batches),
        "environments_alive": len(state.alive_environments()),
    }
    run = state.runs.open
    if run is not None:
        gauges["outstanding_sequences"] = broker.outstanding_sequences(run)
        gauges["trainer_quiet_seconds"] = max(0.0, quiet_seconds(run, state.clock()))
        unpackable = broker.batches.unpackable_sizes(run)
        gauges["unpackable_groups"] = sum(state.queue.groups_by_size[size] for size in unpackable)
        gauges["policy_held_seconds"] = broker.holds.seconds(run)
        gauges[_spell(metric_names.STEP)] = broker.trained_steps(run)
        if run.policy_version is not None:
            gauges[_spell(metric_names.POLICY_VERSION)] = run.policy_version
        gauges |= _staleness(broker, run)
    return gauges


def _staleness(broker: Broker, run: RunRow) -> dict[str, float]:
    """Return the ages in steps of the newest batch's groups, while it is uncommitted and their versions are known."""
    if not broker.state.batches:
        return {}
    number = max(broker.state.batches)
    steps = [broker.state.runs.step_of(run, version_of(row)) for row in broker.state.batches[number]]
    ages = [max(0, number - 1 - step) for step in steps if step is not None]
    if not ages:
        return {}
    return {
        _spell(metric_names.STALENESS_MEAN): sum(ages) / len(ages),
        _spell(metric_names.STALENESS_MAX): max(ages),
    }


def _series(name: str, meaning: str, kind: str, samples: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {meaning}\n# TYPE {PREFIX}{name} {kind}\n"
    for labels, value in samples:
        yield f"{PREFIX}{name}{labels} {value:d}\n" if isinstance(value, bool) else f"{PREFIX}{name}{labels} {value}\n"


def _spell(name: str) -> str:
    return name.replace("/", "_")


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


BUILD_INFO: Final = "atropos_build_info"


class ProcessMetric(NamedTuple):
    """A metric of the process: its name, its kind and its meaning."""

    name: str
    kind: str
    meaning: str


PROCESS_METRICS: Final = (
    ProcessMetric(BUILD_INFO, "gauge", "1; its labels are the versions of the broker and of Python"),
    ProcessMetric("process_cpu_seconds_total", "counter", "User and system CPU time of the broker's process"),
    ProcessMetric("process_resident_memory_bytes", "gauge", "Memory that the process holds in RAM"),
    ProcessMetric("process_virtual_memory_bytes", "gauge", "Addresses that the process has mapped"),
    ProcessMetric("process_open_fds", "gauge", "Open files and connections"),
    ProcessMetric("process_max_fds", "gauge", "Limit on open files and connections"),
    ProcessMetric("process_start_time_seconds", "gauge", "Start time of the process, in seconds since 1970"),
)


def render_process(version: str) -> Iterator[str]:
    """Yield the lines of the process metrics."""
    values = _measure()
    for metric in PROCESS_METRICS:
        sample = metric.name
        if metric.name == BUILD_INFO:
            sample += f'{{version="{version}",python="{platform.python_version()}"}}'
        yield f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n"
        yield f"{sample} {values.get(metric.name, 1)}\n"


def _measure() -> dict[str, float]:
    process = psutil.Process()
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        return {
            "process_cpu_seconds_total": times.user + times.system,
            "process_resident_memory_bytes": memory.rss,
            "process_virtual_memory_bytes": memory.vms,
            "process_open_fds": process.num_fds(),
            "process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "process_start_time_seconds": process.create_time(),
        }
