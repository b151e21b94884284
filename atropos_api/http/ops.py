"""What operators and watchers ask: health, status, the latest group."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from atropos_api.broker.status import describe_status
from atropos_api.http.bodies import JSON, json_response
from atropos_api.http.forms import latest_as_json
from atropos_api.http.services import services_of

router = APIRouter(tags=["operations"])


@router.get("/livez", summary="The process answers")
@router.get("/health", summary="The process answers")
async def live() -> Response:
    return json_response({"status": "ok"})


@router.get("/readyz", summary="Submissions would be kept")
async def ready(request: Request) -> Response:
    services = services_of(request)
    reason = services.why_not_ready()
    if reason is None:
        return json_response({"status": "ready"})
    if services.stopping:
        return json_response({"status": "stopping"}, status_code=503)
    return json_response({"status": "store unavailable", "detail": reason}, status_code=503)


@router.get("/v1/status", summary="Run, policy, queue, environments, counters")
async def status(request: Request) -> Response:
    return json_response(describe_status(services_of(request).broker))


@router.get("/v1/groups/latest", summary="The group that came last")
async def latest_group(request: Request) -> Response:
    state = services_of(request).broker.state
    if state.latest_body is None:
        return Response(status_code=204)
    return Response(await latest_as_json(state.latest_body, state.latest_form), media_type=JSON)
