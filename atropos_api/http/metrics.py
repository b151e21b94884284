"""`/metrics` in Prometheus' text form, written from the broker's own counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from fastapi import APIRouter, Request, Response

from atropos_api.broker import Broker
from atropos_api.common import metric_names
from atropos_api.http.services import services_of

router = APIRouter(tags=["operations"])

PREFIX: Final = "atropos_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics", summary="Counters and gauges for Prometheus")
async def metrics(request: Request) -> Response:
    text = "".join(_render(services_of(request).broker))
    return Response(text, media_type=CONTENT_TYPE)


def _render(broker: Broker) -> Iterator[str]:
    for name, value in asdict(broker.state.counters).items():
        yield from _series(name, "counter", [("", value)])
    for name, value in _gauges(broker).items():
        yield from _series(name, "gauge", [("", value)])
    queued = [
        (
            f'{{environment="{_escape(row.display_name)}"}}',
            broker.state.queue.sequences_by_env.get(row.environment_id, 0),
        )
        for row in broker.state.environments
    ]
    yield from _series("environment_queued_sequences", "gauge", queued)


def _gauges(broker: Broker) -> dict[str, float]:
    state = broker.state
    gauges: dict[str, float] = {
        "queued_groups": state.queue.groups,
        "queued_sequences": state.queue.sequences,
        "queued_bytes": state.queue.body_bytes,
        "store_bytes": state.bodies.size_bytes(),
        "uncommitted_batches": len(state.batches),
        "environments_alive": len(state.alive_environments()),
    }
    run = state.runs.open
    if run is not None:
        gauges["outstanding_sequences"] = broker.outstanding_sequences(run)
        unpackable = broker.batches.unpackable_sizes(run)
        gauges["unpackable_groups"] = sum(state.queue.groups_by_size[size] for size in unpackable)
        gauges["policy_held_seconds"] = broker.holds.seconds(run)
        gauges[_spell(metric_names.STEP)] = broker.trained_steps(run)
        if run.policy_version is not None:
            gauges[_spell(metric_names.POLICY_VERSION)] = run.policy_version
    return gauges


def _series(name: str, kind: str, samples: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# TYPE {PREFIX}{name} {kind}\n"
    for labels, value in samples:
        yield f"{PREFIX}{name}{labels} {value}\n"


def _spell(name: str) -> str:
    return name.replace("/", "_")


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
