"""`/metrics` in Prometheus' text form: the broker's own counts, and the process's version and resource use."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import Metric as Family

from atropos_api.broker import Broker
from atropos_api.broker.counters import MEANING, Counters
from atropos_api.broker.diagnosis import diagnose
from atropos_api.broker.findings import EDGES
from atropos_api.broker.flow import gather
from atropos_api.broker.queue import version_of
from atropos_api.broker.runs import quiet_seconds
from atropos_api.common import metric_names
from atropos_api.common.prometheus import CONTENT_TYPE, Metric, collect_process, render
from atropos_api.http.context import AppContext, context_of
from atropos_api.routes.schema import TEXT, TEXT_SCHEMA, Answer, Operation
from atropos_api.store.base import RunRow

router = APIRouter(tags=["operations"])

route = functools.partial(Operation, router)

PREFIX: Final = "atropos_"

_GAUGE_HELP: Final = {
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
}

COUNTERS: Final = {one.name: Metric(one.name, "counter", one.metadata[MEANING]) for one in fields(Counters)}

GAUGES: Final = {name: Metric(name, "gauge", text) for name, text in _GAUGE_HELP.items()}

DROPPED: Final = Metric(
    "groups_dropped_total",
    "counter",
    "Groups that were dropped instead of trained, by environment and reason",
    ("environment", "reason"),
)

QUEUED: Final = Metric(
    "environment_queued_sequences",
    "gauge",
    "Sequences of one environment that wait for a batch",
    ("environment",),
)

INFERENCE_SERVERS: Final = Metric(
    "inference_servers",
    "gauge",
    "Registered inference servers, by policy and state",
    ("policy", "state"),
)

FLEET_SERVERS: Final = Metric(
    "fleet_servers",
    "gauge",
    "Inference servers of a launcher: those that are wanted, and those that it runs",
    ("fleet", "state"),
)

BLOCKED: Final = Metric(
    "run_blocked",
    "gauge",
    "1 on the edge of the flow on which the open run is blocked, as the live page shows it",
    ("edge",),
)

METRICS: Final = (*COUNTERS.values(), DROPPED, *GAUGES.values(), QUEUED, INFERENCE_SERVERS, FLEET_SERVERS, BLOCKED)


@route(
    "GET /metrics",
    "Counters and gauges for Prometheus",
    answers={200: Answer(help="Counters and gauges in Prometheus' text form", content=TEXT_SCHEMA, media_type=TEXT)},
)
async def metrics(request: Request) -> Response:
    return Response(render(partial(_collect, context_of(request))), media_type=CONTENT_TYPE)


def _collect(context: AppContext) -> Iterator[Family]:
    broker = context.broker
    yield from collect_process()
    yield GAUGES["ready"].family(PREFIX, context.why_not_ready() is None)
    for name, value in asdict(broker.state.counters).items():
        yield COUNTERS[name].family(PREFIX, value)
    for name, value in _gauges(broker).items():
        yield GAUGES[name].family(PREFIX, value)
    yield DROPPED.family(PREFIX, *_dropped(broker))
    queued = broker.state.queue.sequences_by_env
    yield QUEUED.family(
        PREFIX,
        *(((row.display_name,), queued.get(row.environment_id, 0)) for row in broker.state.environments),
    )
    servers = broker.state.servers.counts()
    yield INFERENCE_SERVERS.family(PREFIX, *(((policy, state), count) for policy, state, count in servers))
    fleets = broker.state.fleets.select().fleets
    counts = ((one.fleet_id, {"wanted": one.wanted, "running": one.running}) for one in fleets)
    yield FLEET_SERVERS.family(PREFIX, *(((name, state), n) for name, both in counts for state, n in both.items()))
    yield BLOCKED.family(PREFIX, *_blocked(context))


def _dropped(broker: Broker) -> list[tuple[tuple[str, ...], float]]:
    rows: dict[int | None, str] = {row.environment_id: row.display_name for row in broker.state.environments}
    return [((rows.get(environment_id, ""), reason), count) for environment_id, reason, count in broker.state.drops]


def _blocked(context: AppContext) -> list[tuple[tuple[str, ...], float]]:
    """Return a sample for each edge; none without an open run, because only a run can be blocked or not."""
    facts = gather(context.broker, store_failure=context.store_failure)
    if facts.run is None:
        return []
    finding = diagnose(facts).finding
    return [((edge,), float(finding.severity == "blocked" and finding.edge == edge)) for edge in EDGES]


def _gauges(broker: Broker) -> dict[str, float]:
    state = broker.state
    gauges: dict[str, float] = {
        "queued_groups": state.queue.groups,
        "queued_sequences": state.queue.sequences,
        "queued_bytes": state.queue.body_bytes,
        "queue_oldest_age_seconds": state.oldest_age_seconds() or 0.0,
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


def _spell(name: str) -> str:
    return name.replace("/", "_")
