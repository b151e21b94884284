"""The routes of the v1 contract; groups, pacing and batches come first.

Those are called most, and routes are tried in order. The policy routes are for the versions that the trainer
publishes and for the leases by which evaluations ask it to publish no other. A trainer reads `GET /v1/policy` right
before each publish, with `wait` to block until no hold is left: one small request a step, and the answer to `PUT
/v1/policy` says the same afterwards.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.http.content_negotiation import (
    MEDIA_TYPES,
    encode_pieces,
    form_of_body,
    in_form,
    join_batch,
    read_submission,
    wanted_form,
)
from atropos_api.http.context import AppContext, context_of
from atropos_api.http.request import (
    JSON,
    RequestView,
    decode_body,
    in_thread_if_large,
    json_response,
    parse_int,
    read_body,
    read_int,
    read_key,
    read_wait,
)
from atropos_api.http.streaming import ChunkedResponse, ConfirmedResponse, LongPoll
from atropos_api.routes.schema import (
    COUNT,
    EPOCH,
    EXAMPLE_GROUP,
    FROM_ONE,
    INTEGER,
    KEY,
    NOTHING,
    OPEN_RUN,
    RUN_ID,
    TEXT_SCHEMA,
    WAIT,
    WRITES,
    Answer,
    Operation,
    in_path,
    in_query,
    ok,
)
from atropos_api.store.base import GroupRow
from atropos_api.wire.group_json import CheckedGroup
from atropos_api.wire.groups import Batch, Form
from atropos_api.wire.messages import (
    CommitRequest,
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    FinishRequest,
    Hold,
    HoldRequest,
    ItemLease,
    ItemRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    RunInfo,
    RunRequest,
    Submission,
    SubmitAnswer,
)

router = APIRouter(tags=["v1"])

route = functools.partial(Operation, router)

ENVIRONMENT_ID: Final = in_path("environment_id", INTEGER, "As given at registration")
NUMBER: Final = in_path("number", FROM_ONE, "Number of the batch; the first is 1")

_encode = msgspec.json.Encoder().encode


@route(
    "POST /v1/groups",
    "Submit scored groups",
    help="All groups are of one environment; the body is JSON or binary columns. The request is accepted or refused "
    "as a whole.",
    parameters=(
        KEY,
        in_query("run_id", TEXT_SCHEMA, "The run that the groups are for; another run that is open does not get them"),
    ),
    body=Submission,
    columns=True,
    example={"environment_id": 0, "groups": [EXAMPLE_GROUP]},
    answers={202: Answer(help="Stored: it survives a crash of the broker", content=SubmitAnswer)},
    errors=("invalid-request", "invalid-group", "unsupported-media-type", "unknown-environment", "queue-full", *WRITES),
)
async def submit(request: Request) -> Response:
    view = RequestView.of(request, b"")
    key, form = read_key(view), form_of_body(view)
    submission = await in_thread_if_large(functools.partial(read_submission, form=form), await read_body(request))
    return _take(context_of(request), view, key, *submission)


def answer_submit(context: AppContext, view: RequestView) -> Response:
    key, form = read_key(view), form_of_body(view)
    return _take(context, view, key, *read_submission(view.body, form))


def _take(context: AppContext, view: RequestView, key: str | None, env_id: int, groups: list[CheckedGroup]) -> Response:
    broker = context.broker
    run_id = view.parameter("run_id") if view.query else None
    submitted = broker.take(env_id, groups, key=key, run_id=run_id)

    def note(accepted: bool) -> None:
        broker.settle(submitted, arrived=accepted)

    pieces = [_encode(submitted.answer)]
    if not submitted.repeatable:
        broker.settle(submitted)
        return ChunkedResponse(pieces, media_type=JSON, status_code=202)
    return ConfirmedResponse(pieces, on_result=note, media_type=JSON, status_code=202)


@route(
    "PUT /v1/environments/{environment_id}/heartbeat",
    "Report that the environment is alive, and get its pacing or the next change of it",
    parameters=(
        ENVIRONMENT_ID,
        in_query("revision", INTEGER, "The caller's revision; with `wait`, answered once it changes"),
        in_query("process", TEXT_SCHEMA, "The process as registered; if another has the id now, register again"),
        WAIT,
    ),
    answers=ok(Pacing, "How much the environment should have in flight"),
    errors=("invalid-request", "unknown-environment", *WRITES),
)
async def heartbeat(request: Request, environment_id: str) -> Response:
    context = context_of(request)
    wanted = parse_int(environment_id, "environment_id")
    revision = read_int(request, "revision")
    process = request.query_params.get("process", "")
    wait = LongPoll(request, read_wait(request))
    with context.broker.state.environments.waiting(process):
        while True:
            pacing = context.broker.heartbeat(wanted, process)
            if pacing.revision != revision or not await wait.on(context.pacing_notifier):
                return json_response(pacing)


@route(
    "PUT /v1/environments/{environment_id}/dropped",
    "Report how many groups the environment dropped, and why",
    help="Totals by reason since `session` began, so that a report may be repeated; /v1/status and /metrics show them.",
    parameters=(ENVIRONMENT_ID,),
    body=DropReport,
    example={
        "session": "5f0c2a",
        "groups": {"equal-scores": 96},
        "explanation": "96 groups scored, all dropped: every score is 0",
    },
    answers=NOTHING,
    errors=("invalid-request", "unknown-environment", *WRITES),
)
async def report_dropped(request: Request, environment_id: str) -> Response:
    report = decode_body(await read_body(request), DropReport)
    context_of(request).broker.report_dropped(parse_int(environment_id, "environment_id"), report)
    return Response(status_code=204)


@route(
    "POST /v1/environments/{environment_id}/items",
    "Lease items of the environment's data, and report what happened to those leased before",
    help="Items are numbers, counted from 0 in each run. One is leased until it is finished or dropped, or until "
    "another process of the environment asks: then it is leased again, before new ones. A repeated call gets the same "
    "answer.",
    parameters=(ENVIRONMENT_ID,),
    body=ItemRequest,
    example={"process": "5f0c2a", "call": 2, "finished": [0, 1], "dropped": {"equal-scores": [2]}, "count": 3},
    answers=ok(ItemLease, "The items that this process now has leased"),
    errors=("invalid-request", "unknown-environment", "item-call-is-over", *WRITES),
)
async def lease_items(request: Request, environment_id: str) -> Response:
    asked = decode_body(await read_body(request), ItemRequest)
    broker = context_of(request).broker
    return json_response(broker.lease_items(parse_int(environment_id, "environment_id"), asked))


@route(
    "GET /v1/batches/{number}",
    "Batch by number; the same bytes until it is committed",
    help="The batch is formed at the first request and has the same groups and bytes until it is committed. The "
    "answer is in binary columns if `Accept` names them.",
    parameters=(
        NUMBER,
        RUN_ID,
        EPOCH,
        WAIT,
        in_query("rank", COUNT | {"default": 0}, "The rank whose slice is asked for"),
        in_query("world_size", FROM_ONE | {"default": 1}, "Ranks that share the batch"),
    ),
    answers={
        200: Answer(help="The batch, or this rank's slice of it", content=Batch, columns=True),
        204: Answer(help="It cannot be formed yet; ask again (Retry-After: 0)"),
    },
    errors=(
        *OPEN_RUN,
        "invalid-request",
        "not-acceptable",
        "batch-out-of-order",
        "batch-committed",
        "batch-damaged",
        *WRITES,
    ),
)
async def get_batch(request: Request, number: str) -> Response:
    context = context_of(request)
    run_id = request.query_params.get("run_id")
    epoch = read_int(request, "epoch")
    world_size = read_int(request, "world_size", 1, least=1) or 1
    rank = read_int(request, "rank", 0, least=0) or 0
    wanted = parse_int(number, "number", least=1)
    form = wanted_form(request)
    wait = LongPoll(request, read_wait(request))
    while True:
        groups = context.broker.get_batch(wanted, run_id=run_id, epoch=epoch, rank=rank, world_size=world_size)
        if groups is not None:
            return await _batch_response(request, context, wanted, groups, form)
        with context.broker.state.activity.batch_wait.request(context.broker.state.clock):
            waited = await wait.on(context.groups_notifier, at_most=_until_retry(context))
        if not waited:
            return Response(status_code=204, headers={"Retry-After": "0"})


def _until_retry(context: AppContext) -> float:
    """Return the seconds until a batch that waits for an environment's minimum may be formed without it."""
    retry_at = context.broker.batches.retry_at
    return float("inf") if retry_at is None else max(0.01, retry_at - context.broker.state.clock())


async def _batch_response(
    request: Request, context: AppContext, number: int, groups: list[GroupRow], form: Form
) -> Response:
    run = context.broker.state.runs.require_open()
    bodies = await in_form(context.broker.read_bodies(groups), groups, form)
    pieces, headers = await encode_pieces(request, join_batch(number, run.run_id, run.policy, bodies, form))
    return ChunkedResponse(pieces, media_type=MEDIA_TYPES[form], headers=headers)


@route(
    "POST /v1/batches/{number}/commit",
    "Declare that a checkpoint covers everything up to this batch",
    help="The broker may then delete the groups of those batches. Repeating the call is harmless.",
    parameters=(NUMBER,),
    body=CommitRequest,
    example={"run_id": "run-0123456789ab", "epoch": 1},
    answers=NOTHING,
    errors=(*OPEN_RUN, "invalid-request", "batch-out-of-order", *WRITES),
)
async def commit(request: Request, number: str) -> Response:
    wanted = decode_body(await read_body(request), CommitRequest)
    broker = context_of(request).broker
    broker.commit(parse_int(number, "number", least=1), run_id=wanted.run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@route(
    "POST /v1/runs",
    "Begin or resume a run",
    help="Closes the run that is open, unless it has another name and its trainer called recently: then `take_over` "
    "is needed. With `resume`, takes over the newest run of that name under a higher epoch.",
    body=RunRequest,
    example={"name": "demo", "batch_size": 16, "max_token_length": 2048, "num_steps": 40},
    answers=ok(RunInfo, "The run, and the number of its next batch"),
    errors=("invalid-request", "run-in-progress", *WRITES),
)
async def begin_run(request: Request) -> Response:
    wanted = decode_body(await read_body(request), RunRequest)
    return json_response(context_of(request).broker.begin_run(wanted))


@route(
    "POST /v1/runs/{run_id}/finish",
    "End a run and ask its environments to stop",
    help="With `epoch`, a run that another trainer has taken over is not ended. Repeating the call is harmless.",
    parameters=(in_path("run_id", TEXT_SCHEMA, "As given when the run began"),),
    body=FinishRequest,
    body_required=False,
    example={"epoch": 1},
    answers=NOTHING,
    errors=("unknown-run", "run-superseded", "invalid-request", *WRITES),
)
async def finish_run(request: Request, run_id: str) -> Response:
    wanted = decode_body(await read_body(request), FinishRequest)
    context_of(request).broker.finish_run(run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@route(
    "POST /v1/environments",
    "Register an environment by a stable name",
    help="The same name gets the same id, also after a restart of either side; of two processes that run at the same "
    "time and name themselves, the second is another environment. Group sizes are judged together: while "
    "the environment's size fills no batch, alone or with the others, its pacing has no room and gives the reason.",
    body=EnvironmentRequest,
    example={"name": "gsm8k", "group_size": 8, "max_token_length": 2048},
    answers=ok(EnvironmentInfo, "The environment's id, and the settings of the run"),
    errors=("invalid-request", "group-size-cannot-fill-batch", *WRITES),
)
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), EnvironmentRequest)
    return json_response(context_of(request).broker.register_environment(wanted))


@route(
    "DELETE /v1/environments/{environment_id}",
    "Disconnect an environment",
    help="Its weight and minimum no longer count; its groups stay usable. Its next call connects it again.",
    parameters=(ENVIRONMENT_ID,),
    answers=NOTHING,
    errors=("invalid-request", "unknown-environment", *WRITES),
)
async def leave(request: Request, environment_id: str) -> Response:
    context_of(request).broker.disconnect_environment(parse_int(environment_id, "environment_id"))
    return Response(status_code=204)


@route(
    "PUT /v1/policy",
    "Announce a published policy version",
    help="To be called after each successful publish. Versions must increase; repeating a call is harmless.",
    body=PolicyUpdate,
    example={"run_id": "run-0123456789ab", "version": 7, "step": 6, "published_at": 1767225600.0},
    answers=ok(PolicyState, "The published policy, and how long the trainer should keep it"),
    errors=(*OPEN_RUN, "invalid-request", "policy-not-newer", *WRITES),
)
async def update_policy(request: Request) -> Response:
    update = decode_body(await read_body(request), PolicyUpdate)
    return json_response(context_of(request).broker.update_policy(update))


@route(
    "GET /v1/policy",
    "The published policy, and for how long evaluations ask to keep it",
    help="With `wait`, the answer comes once no evaluation holds the policy.",
    parameters=(RUN_ID, EPOCH, WAIT),
    answers=ok(PolicyState, "The published policy, and how long the trainer should keep it"),
    errors=(*OPEN_RUN, "invalid-request"),
)
async def policy(request: Request) -> Response:
    context = context_of(request)
    run_id, epoch = request.query_params.get("run_id"), read_int(request, "epoch")
    wait = LongPoll(request, read_wait(request))
    while True:
        state = context.broker.policy_state(run_id, epoch)
        if not state.held_seconds:
            return json_response(state)
        with context.broker.state.activity.publish_wait.request(context.broker.state.clock):
            waited = await wait.on(context.pacing_notifier, at_most=state.held_seconds)
        if not waited:
            return json_response(state)


@route(
    "POST /v1/policy/hold",
    "Ask the trainer to publish no other policy for some time, or extend such a hold",
    body=HoldRequest,
    example={"seconds": 60, "reason": "evaluation"},
    answers=ok(Hold, "The lease"),
    errors=("invalid-request", "no-open-run", "unknown-hold", *WRITES),
)
async def hold(request: Request) -> Response:
    wanted = decode_body(await read_body(request), HoldRequest)
    return json_response(context_of(request).broker.holds.hold(wanted))


@route(
    "DELETE /v1/policy/hold/{hold_id}",
    "Release a hold; the answer says if the policy was kept",
    parameters=(in_path("hold_id", TEXT_SCHEMA, "As given when the hold was granted"),),
    answers=ok(Hold, "The lease at its end"),
    errors=("no-open-run", "unknown-hold", *WRITES),
)
async def release(request: Request, hold_id: str) -> Response:
    return json_response(context_of(request).broker.holds.release(hold_id))


@route(
    "DELETE /v1/policy/hold",
    "End every hold",
    answers=NOTHING,
    errors=("no-open-run", *WRITES),
)
async def release_all(request: Request) -> Response:
    context_of(request).broker.holds.release_all()
    return Response(status_code=204)
