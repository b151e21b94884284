"""The routes of the fleets: a launcher's report on its inference servers, and requests for another number of them."""

from __future__ import annotations

import functools
import re
from typing import Final

from fastapi import APIRouter, Request, Response

from atropos_api.errors import InvalidRequest
from atropos_api.http.context import context_of
from atropos_api.http.request import decode_body, json_response, read_body, read_wait
from atropos_api.http.streaming import LongPoll
from atropos_api.routes.schema import NOTHING, TEXT_SCHEMA, WAIT, Operation, in_path, in_query, ok
from atropos_api.wire.fleets import FLEET_ID, Fleet, FleetLease, FleetReport, FleetSet, ScaleRequest

router = APIRouter(tags=["v1"])

route = functools.partial(Operation, router)

FLEET_ID_PARAMETER: Final = in_path(
    "fleet_id", {"type": "string", "pattern": f"^{FLEET_ID}$"}, "Name of the fleet, kept over its launcher's restarts"
)


@route(
    "PUT /v1/fleets/{fleet_id}",
    "Report on the inference servers that a launcher starts, and learn how many are wanted",
    help="The report renews a lease; while it lasts, no other launcher may report on this fleet. The launcher aims at "
    "the number of the answer, and names the request in its next reports.",
    parameters=(FLEET_ID_PARAMETER,),
    body=FleetReport,
    example={"launcher_id": "5b1c0e9a77d24c11", "wanted": 1, "running": 1, "least": 1, "most": 8},
    answers=ok(FleetLease, "The wanted number, and the lease"),
    errors=("invalid-request", "fleet-id-in-use"),
)
async def renew(request: Request, fleet_id: str) -> Response:
    if re.fullmatch(FLEET_ID, fleet_id) is None:
        raise InvalidRequest(
            f"fleet_id: letters, digits and . _ : ~ - are needed, 200 at most, got {fleet_id[:80]!r}",
            field="fleet_id",
            value=fleet_id[:80],
        )
    report = decode_body(await read_body(request), FleetReport)
    return json_response(context_of(request).broker.state.fleets.renew(fleet_id, report))


@route(
    "GET /v1/fleets",
    "The inference servers that launchers start, by launcher",
    help="Those whose launcher has not reported for a lease are left out.",
    answers=ok(FleetSet, "The fleets"),
)
async def list_fleets(request: Request) -> Response:
    return json_response(context_of(request).broker.state.fleets.select())


@route(
    "PUT /v1/fleets/{fleet_id}/wanted",
    "Ask for another number of inference servers",
    help="The newest request counts. With `wait`, the answer comes once the launcher follows it, or a newer one: "
    "`followed` tells if it does. It then starts servers, or lets some end their requests and leave.",
    parameters=(FLEET_ID_PARAMETER, WAIT),
    body=ScaleRequest,
    example={"wanted": 3},
    answers=ok(Fleet, "The fleet"),
    errors=("invalid-request", "unknown-fleet", "cannot-scale"),
)
async def scale(request: Request, fleet_id: str) -> Response:
    context = context_of(request)
    wait = LongPoll(request, read_wait(request))
    wanted = decode_body(await read_body(request), ScaleRequest).wanted
    fleets = context.broker.state.fleets
    number = fleets.scale(fleet_id, wanted)
    while not fleets.is_followed(fleet_id, number) and await wait.on(context.fleets_notifier):
        pass
    return json_response(fleets.describe(fleet_id))


@route(
    "DELETE /v1/fleets/{fleet_id}",
    "End the lease of a launcher that ends",
    parameters=(FLEET_ID_PARAMETER, in_query("launcher_id", TEXT_SCHEMA, "Only this launcher's lease is ended")),
    answers=NOTHING,
    errors=("unknown-fleet",),
)
async def remove(request: Request, fleet_id: str) -> Response:
    launcher_id = request.query_params.get("launcher_id", "")
    context_of(request).broker.state.fleets.remove(fleet_id, launcher_id)
    return Response(status_code=204)
