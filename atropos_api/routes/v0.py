"""The routes of the Atropos contract and their description: existing environments and trainers work unchanged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.broker.status import StatusEnv
from atropos_api.broker.v0 import Checked, LegacyEnvironment, LegacyRegistration, Taken
from atropos_api.errors import InvalidRequest, QueueFull, UnknownEnvironment
from atropos_api.http.content_negotiation import VARIES, encode_pieces, in_form, join_texts, latest_as_json
from atropos_api.http.context import AppContext, context_of
from atropos_api.http.problems import describe_invalid
from atropos_api.http.request import (
    JSON,
    RequestView,
    beside_the_loop,
    decode_body,
    json_response,
    parse_int,
    read_body,
    read_key,
    wants_gzip,
)
from atropos_api.http.streaming import ChunkedResponse, ConfirmedResponse, LongPoll
from atropos_api.routes.schema import (
    EMPTY_EXAMPLE,
    ENV_ID,
    EXAMPLE_GROUP,
    INTEGER,
    KEY,
    NOT_REGISTERED,
    TEXT,
    TEXT_SCHEMA,
    WRITES,
    Answer,
    EnvironmentId,
    EnvironmentLeft,
    EnvironmentRegistered,
    GroupsTaken,
    GroupTaken,
    NextBatch,
    NoExample,
    Operation,
    StepAndQueue,
    TrainerFacts,
    TrainerRegistered,
    WandbFacts,
    Welcome,
    in_query,
    ok,
)
from atropos_api.store.base import GroupRow, RunRow
from atropos_api.wire.group_json import decode_list
from atropos_api.wire.groups import Group

logger = logging.getLogger(__name__)

router = APIRouter(tags=["Atropos contract"])

RECEIVED: Final = b'{"status":"received"}'

BATCH_HEAD: Final = b'{"batch":['

AT_ONCE_BYTES: Final = 1 << 20
"""Batches up to this size are read and sent without letting other requests in between."""

PRESSURE_WAIT_SECONDS: Final = 10.0
"""Time for which a legacy environment's answer is held back before the 503 that makes it drop its data."""


_encode = msgspec.json.Encoder().encode


@router.get("/status-env", summary="Step and queue as one environment should see them")
async def status_env(request: Request) -> Response:
    return answer_status_env(context_of(request), RequestView.of(request, await read_body(request)))


def answer_status_env(services: AppContext, asked: RequestView) -> Response:
    if asked.body:
        environment_id = decode_body(asked.body, EnvironmentId, strict=False).env_id
    elif (given := asked.parameter("env_id")) is not None:
        environment_id = parse_int(given, "env_id")
    else:
        raise InvalidRequest("env_id: it is required, as a JSON body or in the query", field="env_id")
    answer = services.legacy.status.status_env(environment_id)
    return ChunkedResponse([_encode(answer)], media_type=JSON)


@router.post("/scored_data", summary="Submit one group")
async def scored_data(request: Request) -> Response:
    services = context_of(request)
    asked = RequestView.of(request, await read_body(request))
    checked = await beside_the_loop(services.legacy.check_one, asked.body)
    return await _take_with_patience(request, functools.partial(_take_one, services, asked, checked))


def answer_scored_data(services: AppContext, asked: RequestView) -> Response | None:
    with suppress(QueueFull):
        return _take_one(services, asked, services.legacy.check_one(asked.body))
    return None


@router.post("/scored_data_list", summary="Submit several groups")
async def scored_data_list(request: Request) -> Response:
    services = context_of(request)
    asked = RequestView.of(request, await read_body(request))
    check = functools.partial(services.legacy.check, where="[{index}].")
    checked = await beside_the_loop(lambda body: check(decode_list(body)), asked.body)
    return await _take_with_patience(request, functools.partial(_take_list, services, asked, checked))


def answer_scored_data_list(services: AppContext, asked: RequestView) -> Response | None:
    with suppress(QueueFull):
        return _take_list(services, asked, services.legacy.check(decode_list(asked.body), where="[{index}]."))
    return None


@router.get("/batch", summary="Commit the batch handed out before, hand out the next")
async def batch(request: Request) -> Response:
    services = context_of(request)
    # Two trainers that poll at the same time get a batch each, one after the other.
    await services.legacy_turn.take()
    try:
        return await _next_batch(request, services)
    except BaseException:
        services.legacy_turn.give_back()
        raise


def answer_batch(services: AppContext, asked: RequestView) -> Response | None:
    """Return the next batch if it is small and no other call is being handed one.

    One that turns out to be large was not delivered, so the same call gets it again through the application.
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
        if not isinstance(response, ConfirmedResponse):
            services.legacy_turn.give_back()
    return response


@router.get("/", summary="Who answers")
async def root() -> Response:
    return json_response({"message": "AtroposLib API"})


@router.post("/register", summary="A trainer begins its run, or comes back to it")
async def register(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyRegistration, strict=False)
    return json_response({"uuid": context_of(request).legacy.register(wanted)})


@router.post("/register-env", summary="An environment registers")
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyEnvironment, strict=False)
    services = context_of(request)
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
    services = context_of(request)
    try:
        services.broker.disconnect_environment(wanted.env_id)
    except UnknownEnvironment as error:
        return json_response({"status": "failure", "error": str(error)})
    return json_response({"status": "success"})


@router.get("/wandb_info", summary="Where the trainer logs")
async def wandb_info(request: Request) -> Response:
    run = context_of(request).broker.state.runs.open
    return json_response({"group": run.wandb_group if run else None, "project": run.wandb_project if run else None})


@router.get("/info", summary="Batch size and longest sequence, and the model to ask for where that changes")
async def info(request: Request) -> Response:
    services = context_of(request)
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
    broker = context_of(request).broker
    run = broker.state.runs.open
    step = broker.trained_steps(run) if run is not None else 0
    return json_response({"current_step": step, "queue_size": broker.state.queue.groups if run is not None else 0})


@router.get("/latest_example", summary="The group that came last")
async def latest_example(request: Request) -> Response:
    state = context_of(request).broker.state
    if state.latest_body is None:
        return json_response(EMPTY_EXAMPLE)
    return await _json_text(request, await latest_as_json(state.latest_body, state.latest_form))


@router.get("/reset_data", summary="End the run and forget queue and environments")
async def reset_data(request: Request) -> Response:
    context_of(request).legacy.reset()
    return Response("Reset successful", media_type="text/plain")


async def _take_with_patience(request: Request, take: Callable[[], Response]) -> Response:
    """Hold the answer back while the queue is full before refusing, because a refusal costs the data."""
    wait = LongPoll(request, PRESSURE_WAIT_SECONDS)
    while True:
        try:
            return take()
        except QueueFull:
            if not await wait.on(context_of(request).pacing_bell):
                raise


def _take_one(services: AppContext, asked: RequestView, checked: Checked) -> Response:
    key = read_key(asked)
    if checked.refused:
        raise checked.refused[0][1]
    taken = services.legacy.take_checked(checked, key=key)
    if taken.buffered:
        return _answer(services, taken, _encode({"status": "buffered", "buffer_size": taken.last_buffer_size}), 200)
    return _answer(services, taken, RECEIVED, 200)


def _take_list(services: AppContext, asked: RequestView, checked: Checked) -> Response:
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


def _answer(services: AppContext, taken: Taken, answer: bytes, status_code: int) -> Response:
    if not taken.repeatable:  # with a key, or with nothing taken, it does not matter if the answer arrives
        return ChunkedResponse([answer], status_code=status_code, media_type=JSON)

    def note(arrived: bool) -> None:
        services.legacy.settle(taken, arrived=arrived)

    return ConfirmedResponse([answer], on_result=note, status_code=status_code, media_type=JSON)


def _next_groups(services: AppContext) -> tuple[RunRow, list[GroupRow]] | Response:
    """Return the groups of the next batch, or the answer if there is none."""
    run = services.broker.state.runs.open
    if run is None or not run.legacy:
        return json_response(NOT_REGISTERED)
    return services.legacy.next_batch() or json_response({"batch": None})


async def _next_batch(request: Request, services: AppContext) -> Response:
    handed = _next_groups(services)
    if isinstance(handed, Response):
        services.legacy_turn.give_back()
        return handed
    run, groups = handed
    bodies = await in_form(services.broker.read_bodies(groups), groups, "json")
    pieces, headers = await encode_pieces(request, join_texts(BATCH_HEAD, bodies))
    return _tracked_batch(services, run, pieces, headers)


def _small_batch(services: AppContext, run: RunRow, groups: list[GroupRow]) -> Response | None:
    if sum(group.body.length for group in groups) > AT_ONCE_BYTES:
        return None
    return _tracked_batch(services, run, join_texts(BATCH_HEAD, services.broker.read_bodies(groups)), VARIES)


def _tracked_batch(
    services: AppContext, run: RunRow, pieces: Sequence[bytes], headers: Mapping[str, str]
) -> ConfirmedResponse:
    on_result = functools.partial(_note_delivery, services, run.run_id, run.handed_batch)
    return ConfirmedResponse(pieces, on_result=on_result, media_type=JSON, headers=headers)


def _note_delivery(services: AppContext, run_id: str, number: int, accepted: bool) -> None:
    try:
        if accepted:
            services.legacy.confirm_delivery(run_id, number)
        else:
            logger.info("batch %d was not delivered whole; it will be answered again", number)
    finally:
        services.legacy_turn.give_back()


async def _json_text(request: Request, body: bytes) -> Response:
    pieces, headers = await encode_pieces(request, [body])
    return ChunkedResponse(pieces, media_type=JSON, headers=headers)


LEGACY: Final = (
    Operation(
        method="GET",
        path="/",
        answers=ok(Welcome, "The name of the API", {"message": "AtroposLib API"}),
    ),
    Operation(
        method="POST",
        path="/register",
        help="With the project, group and directory of the open run this is a reconnection to it, unless the run has "
        "handed out its last batch or its trainer has been silent for 15 minutes. While a trainer with other names is "
        "at work the call is refused.",
        body=LegacyRegistration,
        example={
            "wandb_group": "demo",
            "wandb_project": "demo",
            "batch_size": 16,
            "max_token_len": 2048,
            "checkpoint_dir": "checkpoints",
            "save_checkpoint_interval": 5,
            "starting_step": 0,
            "num_steps": 40,
        },
        answers=ok(TrainerRegistered, "An integer that is never asked for again"),
        errors=("invalid-request", "run-in-progress", *WRITES),
    ),
    Operation(
        method="POST",
        path="/register-env",
        help="Sizes are judged together with those registered or asked for in the last seconds: one that fills no "
        "batch yet is told to ask again, with what it waits for.",
        body=LegacyEnvironment,
        example={"max_token_length": 2048, "desired_name": "gsm8k", "weight": 1.0, "group_size": 8},
        answers=ok(
            EnvironmentRegistered,
            "`success` and its id; or `wait for trainer to start`, or `wait: ...` with the sizes that fill no batch",
        ),
        errors=("invalid-request", "group-size-cannot-fill-batch", *WRITES),
    ),
    Operation(
        method="POST",
        path="/disconnect-env",
        body=ENV_ID,
        example={"env_id": 0},
        answers=ok(EnvironmentLeft, "Failure means: no such environment"),
        errors=("invalid-request", *WRITES),
    ),
    Operation(
        method="GET",
        path="/status-env",
        help='The id in the query or, as Atropos\' own clients send it, in a JSON body: `{"env_id": 0}`.',
        parameters=(in_query("env_id", INTEGER, "As given at registration"),),
        answers=ok(StatusEnv, "Step and queue as this environment should see them, in groups of its size"),
        errors=("invalid-request", "unknown-environment", "invalid-gzip", "body-too-large", *WRITES),
    ),
    Operation(
        method="POST",
        path="/scored_data",
        parameters=(KEY,),
        body=Group,
        example=EXAMPLE_GROUP | {"env_id": 0},
        answers=ok(GroupTaken, "Kept; buffered if no batch can use it yet", {"status": "received"}),
        errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
    ),
    Operation(
        method="POST",
        path="/scored_data_list",
        help="Valid groups are taken even where others of the list are refused (422 then names those).",
        parameters=(KEY,),
        body=list[Group],
        example=[EXAMPLE_GROUP | {"env_id": 0}],
        answers=ok(GroupsTaken, "Kept", {"status": "received", "groups_processed": 1}),
        errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
    ),
    Operation(
        method="GET",
        path="/batch",
        help="Commits the batch handed out before, if its answer was delivered whole.",
        answers=ok(
            NextBatch,
            "The batch; null while there is none; `[]` with a status and a message before a trainer registered",
            {"batch": None},
        ),
        errors=("no-open-run", "batch-damaged", *WRITES),
    ),
    Operation(
        method="GET",
        path="/status",
        answers=ok(StepAndQueue, "Queue in groups"),
    ),
    Operation(
        method="GET",
        path="/info",
        answers=ok(
            TrainerFacts,
            "-1 before a trainer registered; policy_name besides, where the newest policy has a model name of its own",
        ),
    ),
    Operation(
        method="GET",
        path="/wandb_info",
        answers=ok(WandbFacts),
    ),
    Operation(method="GET", path="/latest_example", answers=ok((Group, NoExample), "The group that came last")),
    Operation(
        method="GET",
        path="/reset_data",
        help="Ends the run of whoever is at work. What it did not train stays on disk as left over and is served to no "
        "other run.",
        answers={200: Answer(help="Done", content=TEXT_SCHEMA, media_type=TEXT, example="Reset successful")},
        errors=WRITES,
    ),
)
