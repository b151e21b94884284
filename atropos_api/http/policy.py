"""The published policy: what the trainer announces, and the leases by which evaluations ask it to publish no other.

A trainer reads `GET /v1/policy` right before each publish, with `wait` to sleep until nobody holds it: one small
request a step, and the answer to `PUT /v1/policy` says the same afterwards.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from atropos_api.http.bodies import decode_body, json_response, read_body
from atropos_api.http.parameters import read_int, read_wait
from atropos_api.http.services import services_of
from atropos_api.http.waiting import Wait
from atropos_api.wire.messages import HoldRequest, PolicyUpdate

router = APIRouter(prefix="/v1/policy", tags=["v1"])


@router.put("", summary="Announce a published policy version")
async def update_policy(request: Request) -> Response:
    update = decode_body(await read_body(request), PolicyUpdate)
    return json_response(services_of(request).broker.update_policy(update))


@router.get("", summary="The published policy, and for how long evaluations ask to leave it so")
async def policy(request: Request) -> Response:
    services = services_of(request)
    run_id, epoch = request.query_params.get("run_id"), read_int(request, "epoch")
    wait = Wait(request, read_wait(request))
    while True:
        state = services.broker.policy_state(run_id, epoch)
        if not state.held_seconds or not await wait.on(services.pacing_bell, at_most=state.held_seconds):
            return json_response(state)


@router.post("/hold", summary="Ask the trainer to publish no other policy for a while, or a while longer")
async def hold(request: Request) -> Response:
    wanted = decode_body(await read_body(request), HoldRequest)
    return json_response(services_of(request).broker.holds.hold(wanted))


@router.delete("/hold/{hold_id}", summary="Give a hold back; the answer says whether the policy stayed")
async def release(request: Request, hold_id: str) -> Response:
    return json_response(services_of(request).broker.holds.release(hold_id))


@router.delete("/hold", summary="End every hold")
async def release_all(request: Request) -> Response:
    services_of(request).broker.holds.release_all()
    return Response(status_code=204)
