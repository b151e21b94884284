"""The v1 contract: groups, pacing and batches first, for they are called all the time; runs, environments."""

from __future__ import annotations

import functools

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.http.asked import Asked
from atropos_api.http.bodies import JSON, beside_the_loop, decode_body, json_response, read_body
from atropos_api.http.delivery import PiecesResponse, TrackedResponse
from atropos_api.http.forms import (
    MEDIA_TYPES,
    encode_pieces,
    form_of_body,
    in_form,
    join_batch,
    read_submission,
    wanted_form,
)
from atropos_api.http.parameters import parse_int, read_int, read_key, read_wait
from atropos_api.http.services import Services, services_of
from atropos_api.http.waiting import Wait
from atropos_api.store.base import GroupRow
from atropos_api.wire.groups import Form
from atropos_api.wire.messages import CommitRequest, DropReport, EnvironmentRequest, FinishRequest, RunRequest
from atropos_api.wire.payload import CheckedGroup

router = APIRouter(prefix="/v1", tags=["v1"])

_encode = msgspec.json.Encoder().encode


@router.post("/groups", summary="Submit scored groups", status_code=202)
async def submit(request: Request) -> Response:
    asked = Asked.of(request, b"")
    key, form = read_key(asked), form_of_body(asked)
    submission = await beside_the_loop(functools.partial(read_submission, form=form), await read_body(request))
    return _take(services_of(request), key, *submission)


def answer_submit(services: Services, asked: Asked) -> Response:
    key, form = read_key(asked), form_of_body(asked)
    return _take(services, key, *read_submission(asked.body, form))


def _take(services: Services, key: str | None, env_id: int, groups: list[CheckedGroup]) -> Response:
    broker = services.broker
    submitted = broker.take(env_id, groups, key=key)

    def note(accepted: bool) -> None:
        broker.settle(submitted, arrived=accepted)

    pieces = [_encode(submitted.answer)]
    if not submitted.repeatable:
        broker.settle(submitted)
        return PiecesResponse(pieces, media_type=JSON, status_code=202)
    return TrackedResponse(pieces, on_result=note, media_type=JSON, status_code=202)


@router.put("/environments/{environment_id}/heartbeat", summary="Stay alive; pacing, or its next change")
async def heartbeat(request: Request, environment_id: str) -> Response:
    services = services_of(request)
    wanted = parse_int(environment_id, "environment_id")
    revision = read_int(request, "revision")
    wait = Wait(request, read_wait(request))
    while True:
        pacing = services.broker.heartbeat(wanted)
        if pacing.revision != revision or not await wait.on(services.pacing_bell):
            return json_response(pacing)


@router.delete("/environments/{environment_id}", summary="An environment leaves")
async def leave(request: Request, environment_id: str) -> Response:
    services_of(request).broker.disconnect_environment(parse_int(environment_id, "environment_id"))
    return Response(status_code=204)


@router.put("/environments/{environment_id}/dropped", summary="How many groups the environment dropped, and why")
async def report_dropped(request: Request, environment_id: str) -> Response:
    report = decode_body(await read_body(request), DropReport)
    services_of(request).broker.report_dropped(parse_int(environment_id, "environment_id"), report)
    return Response(status_code=204)


@router.get("/batches/{number}", summary="Batch by number; the same bytes until it is committed")
async def get_batch(request: Request, number: str) -> Response:
    services = services_of(request)
    run_id = request.query_params.get("run_id")
    epoch = read_int(request, "epoch")
    world_size = read_int(request, "world_size", 1, least=1) or 1
    rank = read_int(request, "rank", 0, least=0) or 0
    wanted = parse_int(number, "number", least=1)
    form = wanted_form(request)
    wait = Wait(request, read_wait(request))
    while True:
        groups = services.broker.get_batch(wanted, run_id=run_id, epoch=epoch, rank=rank, world_size=world_size)
        if groups is not None:
            return await _batch_response(request, services, wanted, groups, form)
        if not await wait.on(services.groups_bell, at_most=_until_retry(services)):
            return Response(status_code=204, headers={"Retry-After": "0"})


@router.post("/runs", summary="Begin or resume a run")
async def begin_run(request: Request) -> Response:
    wanted = decode_body(await read_body(request), RunRequest)
    return json_response(services_of(request).broker.begin_run(wanted))


@router.post("/runs/{run_id}/finish", summary="End a run; its environments are told to stop")
async def finish_run(request: Request, run_id: str) -> Response:
    wanted = decode_body(await read_body(request), FinishRequest)
    services_of(request).broker.finish_run(run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@router.post("/batches/{number}/commit", summary="Everything up to this batch is covered by a checkpoint")
async def commit(request: Request, number: str) -> Response:
    wanted = decode_body(await read_body(request), CommitRequest)
    broker = services_of(request).broker
    broker.commit(parse_int(number, "number", least=1), run_id=wanted.run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@router.post("/environments", summary="Register an environment by a stable name")
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), EnvironmentRequest)
    return json_response(services_of(request).broker.register_environment(wanted))


def _until_retry(services: Services) -> float:
    """Seconds until a batch that waits for a minimum may be formed without it."""
    retry_at = services.broker.batches.retry_at
    return float("inf") if retry_at is None else max(0.01, retry_at - services.broker.state.clock())


async def _batch_response(
    request: Request, services: Services, number: int, groups: list[GroupRow], form: Form
) -> Response:
    run_id = services.broker.state.runs.require_open().run_id
    bodies = await in_form(services.broker.read_bodies(groups), groups, form)
    pieces, headers = await encode_pieces(request, join_batch(number, run_id, bodies, form))
    return PiecesResponse(pieces, media_type=MEDIA_TYPES[form], headers=headers)
