"""The Atropos contract, so that existing environments and trainers plug in unchanged."""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.broker.legacy import LegacyEnvironment, LegacyRegistration, Taken
from atropos_api.errors import InvalidRequest, QueueFull, UnknownEnvironment
from atropos_api.http.bodies import JSON, decode_body, json_response, read_body
from atropos_api.http.delivery import PiecesResponse, TrackedResponse
from atropos_api.http.forms import encode_pieces, in_form, join_texts, latest_as_json
from atropos_api.http.parameters import parse_int, read_key
from atropos_api.http.problems import describe_invalid
from atropos_api.http.services import Services, services_of
from atropos_api.http.waiting import Wait
from atropos_api.wire.payload import Fields, decode_fields, decode_list

logger = logging.getLogger(__name__)

router = APIRouter(tags=["Atropos contract"])

NOT_REGISTERED: Final = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}
EMPTY_EXAMPLE: Final[dict[str, list[object]]] = {
    "tokens": [],
    "masks": [],
    "scores": [],
    "advantages": [],
    "ref_logprobs": [],
    "generation_params": [],
    "inference_logprobs": [],
    "messages": [],
    "images": [],
}
PRESSURE_WAIT_SECONDS: Final = 10.0
"""Before a legacy environment gets the 503 that makes it drop its data, its answer is held back this long."""


class EnvironmentId(msgspec.Struct):
    env_id: int


@router.get("/status-env", summary="Step and queue as one environment should see them")
async def status_env(request: Request) -> Response:
    body = await read_body(request)
    if body:
        environment_id = decode_body(body, EnvironmentId, strict=False).env_id
    elif (asked := request.query_params.get("env_id")) is not None:
        environment_id = parse_int(asked, "env_id")
    else:
        raise InvalidRequest("env_id: it is required, as a JSON body or in the query", field="env_id")
    answer = services_of(request).legacy.status.status_env(environment_id)
    return PiecesResponse([msgspec.json.encode(answer)], media_type=JSON)


@router.post("/scored_data", summary="Submit one group")
async def scored_data(request: Request) -> Response:
    services = services_of(request)
    taken = await _take(request, services, [decode_fields(await read_body(request))], where="")
    if taken.refused:
        raise taken.refused[0][1]
    if taken.buffered:
        answer: dict[str, Any] = {"status": "buffered", "buffer_size": taken.last_buffer_size}
    else:
        answer = {"status": "received"}
    return _answer(services, taken, answer, 200)


@router.post("/scored_data_list", summary="Submit several groups")
async def scored_data_list(request: Request) -> Response:
    services = services_of(request)
    taken = await _take(request, services, decode_list(await read_body(request)), where="[{index}].")
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(taken.rows) + taken.duplicates}
    if taken.buffered:
        answer |= {"buffered": taken.buffered, "last_buffer_size": taken.last_buffer_size}
    if not taken.refused:
        return _answer(services, taken, answer, 200)
    for _, error in taken.refused:
        logger.warning("refused from a list, its neighbours were taken: %s", error)
    answer["detail"] = [describe_invalid(error) for _, error in taken.refused]
    return _answer(services, taken, answer, 422)


@router.get("/batch", summary="Commit the batch handed out before, hand out the next")
async def batch(request: Request) -> Response:
    services = services_of(request)
    # Two trainers that poll at once get a batch each, one after the other.
    await services.legacy_turn.acquire()
    try:
        return await _next_batch(request, services)
    except BaseException:
        services.legacy_turn.release()
        raise


@router.get("/", summary="Who answers")
async def root() -> Response:
    return json_response({"message": "AtroposLib API"})


@router.post("/register", summary="A trainer begins its run, or comes back to it")
async def register(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyRegistration, strict=False)
    return json_response({"uuid": services_of(request).legacy.register(wanted)})


@router.post("/register-env", summary="An environment registers")
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyEnvironment, strict=False)
    services = services_of(request)
    registered = services.legacy.register_environment(wanted)
    if registered is None:
        return json_response({"status": "wait for trainer to start"})
    environment, run = registered
    return json_response(
        {
            "status": "success",
            "env_id": environment.environment_id,
            "wandb_name": environment.display_name,
            "checkpoint_dir": run.checkpoint_dir,
            "starting_step": services.broker.trained_steps(run),
            "checkpoint_interval": run.checkpoint_interval,
            "num_steps": run.num_steps,
        }
    )


@router.post("/disconnect-env", summary="An environment leaves")
async def disconnect_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), EnvironmentId, strict=False)
    services = services_of(request)
    try:
        services.broker.disconnect_environment(wanted.env_id)
    except UnknownEnvironment as error:
        return json_response({"status": "failure", "error": str(error)})
    return json_response({"status": "success"})


@router.get("/wandb_info", summary="Where the trainer logs")
async def wandb_info(request: Request) -> Response:
    run = services_of(request).broker.state.runs.open
    return json_response({"group": run.wandb_group if run else None, "project": run.wandb_project if run else None})


@router.get("/info", summary="Batch size and longest sequence")
async def info(request: Request) -> Response:
    services = services_of(request)
    run = services.broker.state.runs.open
    return json_response(
        {
            "batch_size": services.legacy.status.batch_sequences(run) if run else -1,
            "max_token_len": run.max_token_length if run else -1,
        }
    )


@router.get("/status", summary="Step and queue")
async def status(request: Request) -> Response:
    broker = services_of(request).broker
    run = broker.state.runs.open
    step = broker.trained_steps(run) if run is not None else 0
    return json_response({"current_step": step, "queue_size": broker.state.queue.groups if run is not None else 0})


@router.get("/latest_example", summary="The group that came last")
async def latest_example(request: Request) -> Response:
    state = services_of(request).broker.state
    if state.latest_body is None:
        return json_response(EMPTY_EXAMPLE)
    return await _json_text(request, await latest_as_json(state.latest_body, state.latest_form))


@router.get("/reset_data", summary="End the run and forget queue and environments")
async def reset_data(request: Request) -> Response:
    services_of(request).legacy.reset()
    return Response("Reset successful", media_type="text/plain")


async def _take(request: Request, services: Services, items: list[Fields], *, where: str) -> Taken:
    """Take groups; under pressure hold the answer back before refusing, for a refusal costs the data."""
    key = read_key(request)
    wait = Wait(request, PRESSURE_WAIT_SECONDS)
    while True:
        try:
            return services.legacy.take(items, key=key, where=where)
        except QueueFull:
            if not await wait.on(services.pacing_bell):
                raise


def _answer(services: Services, taken: Taken, answer: dict[str, Any], status_code: int) -> Response:
    def note(accepted: bool) -> None:
        services.broker.intake.settle(taken.rows)
        if not accepted:
            services.legacy.expect_repeat(taken)

    pieces = [msgspec.json.encode(answer)]
    if not taken.repeatable:
        # Under a key, or with nothing taken, it does not matter whether the answer arrives.
        services.broker.intake.settle(taken.rows)
        return PiecesResponse(pieces, status_code=status_code, media_type=JSON)
    return TrackedResponse(pieces, on_result=note, status_code=status_code, media_type=JSON)


async def _next_batch(request: Request, services: Services) -> Response:
    run = services.broker.state.runs.open
    if run is None or not run.legacy:
        services.legacy_turn.release()
        return json_response(NOT_REGISTERED)
    handed = services.legacy.next_batch()
    if handed is None:
        services.legacy_turn.release()
        return json_response({"batch": None})
    run, groups = handed
    bodies = await in_form(services.broker.read_bodies(groups), groups, "json")
    pieces, headers = await encode_pieces(request, join_texts(b'{"batch":[', bodies))
    on_result = functools.partial(_note_delivery, services, run.run_id, run.handed_batch)
    return TrackedResponse(pieces, on_result=on_result, media_type=JSON, headers=headers)


def _note_delivery(services: Services, run_id: str, number: int, accepted: bool) -> None:
    try:
        if accepted:
            services.legacy.confirm_delivery(run_id, number)
        else:
            logger.info("batch %d was not delivered whole; it will be answered again", number)
    finally:
        services.legacy_turn.release()


async def _json_text(request: Request, body: bytes) -> Response:
    pieces, headers = await encode_pieces(request, [body])
    return PiecesResponse(pieces, media_type=JSON, headers=headers)
