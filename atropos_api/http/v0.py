"""The Atropos contract, so that existing environments and trainers plug in unchanged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.broker.legacy import Checked, LegacyEnvironment, LegacyRegistration, Taken
from atropos_api.errors import InvalidRequest, QueueFull, UnknownEnvironment
from atropos_api.http.asked import Asked
from atropos_api.http.bodies import JSON, beside_the_loop, decode_body, json_response, read_body, wants_gzip
from atropos_api.http.delivery import PiecesResponse, TrackedResponse
from atropos_api.http.forms import VARIES, encode_pieces, in_form, join_texts, latest_as_json
from atropos_api.http.parameters import parse_int, read_key
from atropos_api.http.problems import describe_invalid
from atropos_api.http.services import Services, services_of
from atropos_api.http.waiting import Wait
from atropos_api.store.base import GroupRow, RunRow
from atropos_api.wire.payload import decode_list

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
RECEIVED: Final = b'{"status":"received"}'
BATCH_HEAD: Final = b'{"batch":['
AT_ONCE_BYTES: Final = 1 << 20
"""Batches up to this size are read and sent without a pause."""
PRESSURE_WAIT_SECONDS: Final = 10.0
"""Before a legacy environment gets the 503 that makes it drop its data, its answer is held back this long."""


_encode = msgspec.json.Encoder().encode


class EnvironmentId(msgspec.Struct):
    env_id: int


@router.get("/status-env", summary="Step and queue as one environment should see them")
async def status_env(request: Request) -> Response:
    return answer_status_env(services_of(request), Asked.of(request, await read_body(request)))


def answer_status_env(services: Services, asked: Asked) -> Response:
    if asked.body:
        environment_id = decode_body(asked.body, EnvironmentId, strict=False).env_id
    elif (given := asked.parameter("env_id")) is not None:
        environment_id = parse_int(given, "env_id")
    else:
        raise InvalidRequest("env_id: it is required, as a JSON body or in the query", field="env_id")
    answer = services.legacy.status.status_env(environment_id)
    return PiecesResponse([_encode(answer)], media_type=JSON)


@router.post("/scored_data", summary="Submit one group")
async def scored_data(request: Request) -> Response:
    services = services_of(request)
    asked = Asked.of(request, await read_body(request))
    checked = await beside_the_loop(services.legacy.check_one, asked.body)
    return await _take_with_patience(request, functools.partial(_take_one, services, asked, checked))


def answer_scored_data(services: Services, asked: Asked) -> Response | None:
    with suppress(QueueFull):
        return _take_one(services, asked, services.legacy.check_one(asked.body))
    return None


@router.post("/scored_data_list", summary="Submit several groups")
async def scored_data_list(request: Request) -> Response:
    services = services_of(request)
    asked = Asked.of(request, await read_body(request))
    checked = await beside_the_loop(functools.partial(_check_list, services), asked.body)
    return await _take_with_patience(request, functools.partial(_take_list, services, asked, checked))


def answer_scored_data_list(services: Services, asked: Asked) -> Response | None:
    with suppress(QueueFull):
        return _take_list(services, asked, _check_list(services, asked.body))
    return None


@router.get("/batch", summary="Commit the batch handed out before, hand out the next")
async def batch(request: Request) -> Response:
    services = services_of(request)
    # Two trainers that poll at once get a batch each, one after the other.
    await services.legacy_turn.take()
    try:
        return await _next_batch(request, services)
    except BaseException:
        services.legacy_turn.give_back()
        raise


def answer_batch(services: Services, asked: Asked) -> Response | None:
    """The next batch if it is small and nobody else is being handed one.

    One that turns out to be large is offered again to the same call on its long way, for it was not delivered.
    """
    if wants_gzip(asked.header(b"accept-encoding") or "") or not services.legacy_turn.take_now():
        return None
    response: Response | None = None
    try:
        handed = _next_groups(services)
        if isinstance(handed, Response):
            response = handed
        elif all(group.form == "json" for group in handed[1]):
            response = _small_batch(services, *handed)
    finally:
        if not isinstance(response, TrackedResponse):
            services.legacy_turn.give_back()
    return response


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
    if isinstance(registered, str):
        return json_response({"status": registered})
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


@router.get("/info", summary="Batch size and longest sequence, and the model to ask for where that changes")
async def info(request: Request) -> Response:
    services = services_of(request)
    run = services.broker.state.runs.open
    named = {"policy_name": run.policy_name} if run and run.policy_name else {}
    return json_response(
        {
            "batch_size": services.legacy.status.batch_sequences(run) if run else -1,
            "max_token_len": run.max_token_length if run else -1,
            **named,
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


def _check_list(services: Services, body: bytes) -> Checked:
    return services.legacy.check(decode_list(body), where="[{index}].")


async def _take_with_patience(request: Request, take: Callable[[], Response]) -> Response:
    """Under pressure hold the answer back before refusing, for a refusal costs the data."""
    wait = Wait(request, PRESSURE_WAIT_SECONDS)
    while True:
        try:
            return take()
        except QueueFull:
            if not await wait.on(services_of(request).pacing_bell):
                raise


def _take_one(services: Services, asked: Asked, checked: Checked) -> Response:
    key = read_key(asked)
    if checked.refused:
        raise checked.refused[0][1]
    taken = services.legacy.take_checked(checked, key=key)
    if taken.buffered:
        return _answer(services, taken, _encode({"status": "buffered", "buffer_size": taken.last_buffer_size}), 200)
    return _answer(services, taken, RECEIVED, 200)


def _take_list(services: Services, asked: Asked, checked: Checked) -> Response:
    taken = services.legacy.take_checked(checked, key=read_key(asked))
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(taken.rows) + taken.duplicates}
    if taken.buffered:
        answer |= {"buffered": taken.buffered, "last_buffer_size": taken.last_buffer_size}
    if not taken.refused:
        return _answer(services, taken, _encode(answer), 200)
    services.broker.state.counters.groups_refused_total += len(taken.refused)
    services.broker.state.drops.count_of(None, "refused", len(taken.refused))
    for _, error in taken.refused:
        logger.warning("refused from a list, its neighbours were taken: %s", error)
    answer["detail"] = [describe_invalid(error) for _, error in taken.refused]
    return _answer(services, taken, _encode(answer), 422)


def _answer(services: Services, taken: Taken, answer: bytes, status_code: int) -> Response:
    def note(accepted: bool) -> None:
        services.legacy.settle(taken, arrived=accepted)

    if not taken.repeatable:
        # Under a key, or with nothing taken, it does not matter whether the answer arrives.
        return PiecesResponse([answer], status_code=status_code, media_type=JSON)
    return TrackedResponse([answer], on_result=note, status_code=status_code, media_type=JSON)


def _next_groups(services: Services) -> tuple[RunRow, list[GroupRow]] | Response:
    """The groups of the next batch, or what to say where there is none."""
    run = services.broker.state.runs.open
    if run is None or not run.legacy:
        return json_response(NOT_REGISTERED)
    return services.legacy.next_batch() or json_response({"batch": None})


async def _next_batch(request: Request, services: Services) -> Response:
    handed = _next_groups(services)
    if isinstance(handed, Response):
        services.legacy_turn.give_back()
        return handed
    run, groups = handed
    bodies = await in_form(services.broker.read_bodies(groups), groups, "json")
    pieces, headers = await encode_pieces(request, join_texts(BATCH_HEAD, bodies))
    return _tracked_batch(services, run, pieces, headers)


def _small_batch(services: Services, run: RunRow, groups: list[GroupRow]) -> Response | None:
    if sum(group.body.length for group in groups) > AT_ONCE_BYTES:
        return None
    return _tracked_batch(services, run, join_texts(BATCH_HEAD, services.broker.read_bodies(groups)), VARIES)


def _tracked_batch(
    services: Services, run: RunRow, pieces: Sequence[bytes], headers: Mapping[str, str]
) -> TrackedResponse:
    on_result = functools.partial(_note_delivery, services, run.run_id, run.handed_batch)
    return TrackedResponse(pieces, on_result=on_result, media_type=JSON, headers=headers)


def _note_delivery(services: Services, run_id: str, number: int, accepted: bool) -> None:
    try:
        if accepted:
            services.legacy.confirm_delivery(run_id, number)
        else:
            logger.info("batch %d was not delivered whole; it will be answered again", number)
    finally:
        services.legacy_turn.give_back()


async def _json_text(request: Request, body: bytes) -> Response:
    pieces, headers = await encode_pieces(request, [body])
    return PiecesResponse(pieces, media_type=JSON, headers=headers)
