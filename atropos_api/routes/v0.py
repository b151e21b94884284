"""The routes of the Atropos contract: existing environments and trainers work unchanged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from atropos_api.broker.status import StatusEnv
from atropos_api.broker.v0 import CheckedGroups, LegacyEnvironment, LegacyRegistration, V0Receipt
from atropos_api.errors import InvalidRequest, QueueFull, UnknownEnvironment
from atropos_api.http.content_negotiation import VARIES, encode_pieces, in_form, join_texts, latest_as_json
from atropos_api.http.context import AppContext, context_of
from atropos_api.http.problems import describe_invalid
from atropos_api.http.request import (
    JSON,
    RequestView,
    decode_body,
    in_thread_if_large,
    json_response,
    parse_int,
    read_body,
    read_key,
    wants_gzip,
)
from atropos_api.http.streaming import ChunkedResponse, ConfirmedResponse, LongPoll
from atropos_api.page.files import wants_page
from atropos_api.routes.page import answer_page
from atropos_api.routes.schema import (
    ENV_ID,
    EXAMPLE_GROUP,
    INTEGER,
    KEY,
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

route = functools.partial(Operation, router)

RECEIVED: Final = b'{"status":"received"}'
NOT_REGISTERED: Final = NextBatch(batch=[], status="error", message="Trainer not registered. Call /register first.")
BATCH_HEAD: Final = b'{"batch":['
AT_ONCE_BYTES: Final = 1 << 20
"""Batches up to this size are read and sent without letting other requests in between."""

PRESSURE_WAIT_SECONDS: Final = 10.0
"""Time for which a legacy environment's answer is held back before the 503 that makes it drop its data."""


_encode = msgspec.json.Encoder().encode


@route(
    "GET /",
    "The name of the API; for browsers, the live page",
    help="A browser is one whose `Accept` names `text/html`.",
    answers=ok(Welcome, "The name of the API", {"message": "AtroposLib API"}),
)
async def root(request: Request) -> Response:
    if wants_page(request.headers.get("accept", "")):
        return answer_page(request)
    return json_response(Welcome(message="AtroposLib API"))


@route(
    "POST /register",
    "Begin a run as its trainer, or reconnect to it",
    help="A trainer with the open run's project, group and directory reconnects to that run, unless the run has "
    "handed out its last batch or its trainer has been silent for 15 minutes. While a trainer with other names is "
    "active, the call is refused.",
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
    answers=ok(TrainerRegistered, "An integer that no other call needs"),
    errors=("invalid-request", "run-in-progress", *WRITES),
)
async def register(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyRegistration, strict=False)
    return json_response(TrainerRegistered(uuid=context_of(request).legacy.register(wanted)))


@route(
    "POST /register-env",
    "Register an environment",
    help="Group sizes are judged together with those registered or requested in the last seconds. An environment "
    "whose size fills no batch yet gets the status `wait: ...` with the reason, and repeats the call.",
    body=LegacyEnvironment,
    example={"max_token_length": 2048, "desired_name": "gsm8k", "weight": 1.0, "group_size": 8},
    answers=ok(
        EnvironmentRegistered,
        "`success` and its id; or `wait for trainer to start`, or `wait: ...` with the sizes that fill no batch",
    ),
    errors=("invalid-request", "group-size-cannot-fill-batch", *WRITES),
)
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), LegacyEnvironment, strict=False)
    context = context_of(request)
    registered = context.legacy.register_environment(wanted)
    if isinstance(registered, str):
        return json_response(EnvironmentRegistered(status=registered))
    environment, run = registered
    return json_response(
        EnvironmentRegistered(
            status="success",
            env_id=environment.environment_id,
            wandb_name=environment.display_name,
            checkpoint_dir=run.checkpoint_dir,
            starting_step=context.broker.trained_steps(run),
            checkpoint_interval=run.checkpoint_interval,
            num_steps=run.num_steps,
        )
    )


@route(
    "POST /disconnect-env",
    "Disconnect an environment",
    body=ENV_ID,
    example={"env_id": 0},
    answers=ok(EnvironmentLeft, "Failure means: no such environment"),
    errors=("invalid-request", *WRITES),
)
async def disconnect_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), EnvironmentId, strict=False)
    context = context_of(request)
    try:
        context.broker.disconnect_environment(wanted.env_id)
    except UnknownEnvironment as error:
        return json_response(EnvironmentLeft(status="failure", error=str(error)))
    return json_response(EnvironmentLeft(status="success"))


@route(
    "GET /status-env",
    "Step and queue as one environment should see them",
    help='The id in the query or, as Atropos\' own clients send it, in a JSON body: `{"env_id": 0}`.',
    parameters=(in_query("env_id", INTEGER, "As given at registration"),),
    answers=ok(StatusEnv, "Step and queue as this environment should see them, in groups of its size"),
    errors=("invalid-request", "unknown-environment", "invalid-gzip", "body-too-large", *WRITES),
)
async def status_env(request: Request) -> Response:
    return answer_status_env(context_of(request), RequestView.of(request, await read_body(request)))


def answer_status_env(context: AppContext, view: RequestView) -> Response:
    if view.body:
        environment_id = decode_body(view.body, EnvironmentId, strict=False).env_id
    elif (given := view.parameter("env_id")) is not None:
        environment_id = parse_int(given, "env_id")
    else:
        raise InvalidRequest("env_id: it is required, as a JSON body or in the query", field="env_id")
    answer = context.legacy.status.status_env(environment_id)
    return ChunkedResponse([_encode(answer)], media_type=JSON)


@route(
    "POST /scored_data",
    "Submit one group",
    parameters=(KEY,),
    body=Group,
    example=EXAMPLE_GROUP | {"env_id": 0},
    answers=ok(GroupTaken, "Stored; `buffered` if no batch can use it yet", {"status": "received"}),
    errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
)
async def scored_data(request: Request) -> Response:
    context = context_of(request)
    view = RequestView.of(request, await read_body(request))
    checked = await in_thread_if_large(context.legacy.check_one, view.body)
    return await _retry_while_full(request, functools.partial(_take_one, context, view, checked))


def answer_scored_data(context: AppContext, view: RequestView) -> Response | None:
    with suppress(QueueFull):
        return _take_one(context, view, context.legacy.check_one(view.body))
    return None


@route(
    "POST /scored_data_list",
    "Submit several groups",
    help="Valid groups are accepted even if others of the list are refused; the answer is then 422 and names those.",
    parameters=(KEY,),
    body=list[Group],
    example=[EXAMPLE_GROUP | {"env_id": 0}],
    answers=ok(GroupsTaken, "Stored", {"status": "received", "groups_processed": 1}),
    errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
)
async def scored_data_list(request: Request) -> Response:
    context = context_of(request)
    view = RequestView.of(request, await read_body(request))
    check = functools.partial(context.legacy.check, where="[{index}].")
    checked = await in_thread_if_large(lambda body: check(decode_list(body)), view.body)
    return await _retry_while_full(request, functools.partial(_take_list, context, view, checked))


def answer_scored_data_list(context: AppContext, view: RequestView) -> Response | None:
    with suppress(QueueFull):
        return _take_list(context, view, context.legacy.check(decode_list(view.body), where="[{index}]."))
    return None


@route(
    "GET /batch",
    "Commit the batch that was handed out last, and return the next one",
    help="Commits the batch that was handed out last if its answer was delivered completely.",
    answers=ok(
        NextBatch,
        "The batch; null while there is none; `[]` with a status and a message before a trainer registered",
        {"batch": None},
    ),
    errors=("no-open-run", "batch-damaged", *WRITES),
)
async def batch(request: Request) -> Response:
    context = context_of(request)
    # Two trainers that poll at the same time get a batch each, one after the other.
    await context.legacy_batch_lock.acquire()
    try:
        return await _next_batch(request, context)
    except BaseException:
        context.legacy_batch_lock.release()
        raise


def answer_batch(context: AppContext, view: RequestView) -> Response | None:
    """Return the next batch if it is small and no other call is being handed one.

    One that turns out to be large was not delivered, so the same call gets it again through the application.
    """
    if wants_gzip(view.header(b"accept-encoding") or "") or not context.legacy_batch_lock.try_acquire():
        return None
    response: Response | None = None
    try:
        handed = _next_groups(context)
        if isinstance(handed, Response):
            response = handed
        elif all(group.form == "json" for group in handed[1]):
            response = _small_batch(context, *handed)
    finally:
        if not isinstance(response, ConfirmedResponse):
            context.legacy_batch_lock.release()
    return response


@route(
    "GET /status",
    "Step and queue",
    answers=ok(StepAndQueue, "Queue in groups"),
)
async def status(request: Request) -> Response:
    broker = context_of(request).broker
    run = broker.state.runs.open
    if run is None:
        return json_response(StepAndQueue(current_step=0, queue_size=0))
    return json_response(StepAndQueue(current_step=broker.trained_steps(run), queue_size=broker.state.queue.groups))


@route(
    "GET /info",
    "Batch size, longest sequence and, if it changes, the model name to request",
    answers=ok(
        TrainerFacts,
        "-1 before a trainer registered; `policy_name` only if the newest policy has a model name of its own",
    ),
)
async def info(request: Request) -> Response:
    context = context_of(request)
    run = context.broker.state.runs.open
    if run is None:
        return json_response(TrainerFacts(batch_size=-1, max_token_len=-1))
    batch_size = context.legacy.status.batch_sequences(run)
    name = run.policy_name or UNSET
    return json_response(TrainerFacts(batch_size=batch_size, max_token_len=run.max_token_length, policy_name=name))


@route(
    "GET /wandb_info",
    "The trainer's group and project in wandb",
    answers=ok(WandbFacts),
)
async def wandb_info(request: Request) -> Response:
    run = context_of(request).broker.state.runs.open
    return json_response(WandbFacts(group=run.wandb_group if run else None, project=run.wandb_project if run else None))


@route(
    "GET /latest_example",
    "The latest group",
    answers=ok((Group, NoExample), "The latest group"),
)
async def latest_example(request: Request) -> Response:
    state = context_of(request).broker.state
    if state.latest_body is None:
        return json_response({name: [] for name in NoExample.__struct_fields__})
    return await _json_text(request, await latest_as_json(state.latest_body, state.latest_form))


@route(
    "GET /reset_data",
    "End the run and forget queue and environments",
    help="Ends the open run, whichever trainer began it. Its untrained groups stay on disk as left over, and no other "
    "run gets them.",
    answers={200: Answer(help="Done", content=TEXT_SCHEMA, media_type=TEXT, example="Reset successful")},
    errors=WRITES,
)
async def reset_data(request: Request) -> Response:
    context_of(request).legacy.reset()
    return Response("Reset successful", media_type="text/plain")


async def _retry_while_full(request: Request, take: Callable[[], Response]) -> Response:
    """Hold the answer back while the queue is full before refusing, because a refusal costs the data."""
    wait = LongPoll(request, PRESSURE_WAIT_SECONDS)
    while True:
        try:
            return take()
        except QueueFull:
            if not await wait.on(context_of(request).pacing_notifier):
                raise


def _take_one(context: AppContext, view: RequestView, checked: CheckedGroups) -> Response:
    key = read_key(view)
    if checked.refused:
        raise checked.refused[0][1]
    taken = context.legacy.take_checked(checked, key=key)
    if taken.buffered:
        return _answer(context, taken, _encode(GroupTaken(status="buffered", buffer_size=taken.last_buffer_size)), 200)
    return _answer(context, taken, RECEIVED, 200)


def _take_list(context: AppContext, view: RequestView, checked: CheckedGroups) -> Response:
    taken = context.legacy.take_checked(checked, key=read_key(view))
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(taken.rows) + taken.duplicates}
    if taken.buffered:
        answer |= {"buffered": taken.buffered, "last_buffer_size": taken.last_buffer_size}
    if not taken.refused:
        return _answer(context, taken, _encode(answer), 200)
    context.broker.state.counters.groups_refused_total += len(taken.refused)
    context.broker.state.drops.count_of(None, "refused", len(taken.refused))
    for _, error in taken.refused:
        logger.warning("a group of a list was refused, the others were accepted: %s", error)
    answer["detail"] = [describe_invalid(error) for _, error in taken.refused]
    return _answer(context, taken, _encode(answer), 422)


def _answer(context: AppContext, taken: V0Receipt, answer: bytes, status_code: int) -> Response:
    if not taken.repeatable:  # with a key, or with nothing taken, it does not matter if the answer arrives
        return ChunkedResponse([answer], status_code=status_code, media_type=JSON)

    def note(arrived: bool) -> None:
        context.legacy.settle(taken, arrived=arrived)

    return ConfirmedResponse([answer], on_result=note, status_code=status_code, media_type=JSON)


def _next_groups(context: AppContext) -> tuple[RunRow, list[GroupRow]] | Response:
    """Return the groups of the next batch, or the answer if there is none."""
    run = context.broker.state.runs.open
    if run is None or not run.legacy:
        return json_response(NOT_REGISTERED)
    return context.legacy.next_batch() or json_response(NextBatch(batch=None))


async def _next_batch(request: Request, context: AppContext) -> Response:
    handed = _next_groups(context)
    if isinstance(handed, Response):
        context.legacy_batch_lock.release()
        return handed
    run, groups = handed
    bodies = await in_form(context.broker.read_bodies(groups), groups, "json")
    pieces, headers = await encode_pieces(request, join_texts(BATCH_HEAD, bodies))
    return _tracked_batch(context, run, pieces, headers)


def _small_batch(context: AppContext, run: RunRow, groups: list[GroupRow]) -> Response | None:
    if sum(group.body.length for group in groups) > AT_ONCE_BYTES:
        return None
    return _tracked_batch(context, run, join_texts(BATCH_HEAD, context.broker.read_bodies(groups)), VARIES)


def _tracked_batch(
    context: AppContext, run: RunRow, pieces: Sequence[bytes], headers: Mapping[str, str]
) -> ConfirmedResponse:
    on_result = functools.partial(_note_delivery, context, run.run_id, run.handed_batch)
    return ConfirmedResponse(pieces, on_result=on_result, media_type=JSON, headers=headers)


def _note_delivery(context: AppContext, run_id: str, number: int, accepted: bool) -> None:
    try:
        if accepted:
            context.legacy.confirm_delivery(run_id, number)
        else:
            logger.info("batch %d was not delivered completely; the next call gets it again", number)
    finally:
        context.legacy_batch_lock.release()


async def _json_text(request: Request, body: bytes) -> Response:
    pieces, headers = await encode_pieces(request, [body])
    return ChunkedResponse(pieces, media_type=JSON, headers=headers)
