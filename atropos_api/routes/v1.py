"""The routes of the v1 contract and their description `V1`; groups, pacing and batches come first.

Those are called all the time, and routes are tried in order. The policy routes are for the versions that the trainer
publishes and for the leases by which evaluations ask it to publish no other. A trainer reads `GET /v1/policy` right
before each publish, with `wait` to block until nobody holds it: one small request a step, and the answer to `PUT
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
    beside_the_loop,
    decode_body,
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
    Pacing,
    PolicyState,
    PolicyUpdate,
    RunInfo,
    RunRequest,
    Submission,
    SubmitAnswer,
)

router = APIRouter(prefix="/v1", tags=["v1"])

_encode = msgspec.json.Encoder().encode


@router.post("/groups", summary="Submit scored groups", status_code=202)
async def submit(request: Request) -> Response:
    asked = RequestView.of(request, b"")
    key, form = read_key(asked), form_of_body(asked)
    submission = await beside_the_loop(functools.partial(read_submission, form=form), await read_body(request))
    return _take(context_of(request), key, *submission)


def answer_submit(services: AppContext, asked: RequestView) -> Response:
    key, form = read_key(asked), form_of_body(asked)
    return _take(services, key, *read_submission(asked.body, form))


def _take(services: AppContext, key: str | None, env_id: int, groups: list[CheckedGroup]) -> Response:
    broker = services.broker
    submitted = broker.take(env_id, groups, key=key)

    def note(accepted: bool) -> None:
        broker.settle(submitted, arrived=accepted)

    pieces = [_encode(submitted.answer)]
    if not submitted.repeatable:
        broker.settle(submitted)
        return ChunkedResponse(pieces, media_type=JSON, status_code=202)
    return ConfirmedResponse(pieces, on_result=note, media_type=JSON, status_code=202)


@router.put("/environments/{environment_id}/heartbeat", summary="Stay alive; pacing, or its next change")
async def heartbeat(request: Request, environment_id: str) -> Response:
    services = context_of(request)
    wanted = parse_int(environment_id, "environment_id")
    revision = read_int(request, "revision")
    wait = LongPoll(request, read_wait(request))
    while True:
        pacing = services.broker.heartbeat(wanted)
        if pacing.revision != revision or not await wait.on(services.pacing_bell):
            return json_response(pacing)


@router.delete("/environments/{environment_id}", summary="An environment leaves")
async def leave(request: Request, environment_id: str) -> Response:
    context_of(request).broker.disconnect_environment(parse_int(environment_id, "environment_id"))
    return Response(status_code=204)


@router.put("/environments/{environment_id}/dropped", summary="How many groups the environment dropped, and why")
async def report_dropped(request: Request, environment_id: str) -> Response:
    report = decode_body(await read_body(request), DropReport)
    context_of(request).broker.report_dropped(parse_int(environment_id, "environment_id"), report)
    return Response(status_code=204)


@router.get("/batches/{number}", summary="Batch by number; the same bytes until it is committed")
async def get_batch(request: Request, number: str) -> Response:
    services = context_of(request)
    run_id = request.query_params.get("run_id")
    epoch = read_int(request, "epoch")
    world_size = read_int(request, "world_size", 1, least=1) or 1
    rank = read_int(request, "rank", 0, least=0) or 0
    wanted = parse_int(number, "number", least=1)
    form = wanted_form(request)
    wait = LongPoll(request, read_wait(request))
    while True:
        groups = services.broker.get_batch(wanted, run_id=run_id, epoch=epoch, rank=rank, world_size=world_size)
        if groups is not None:
            return await _batch_response(request, services, wanted, groups, form)
        if not await wait.on(services.groups_bell, at_most=_until_retry(services)):
            return Response(status_code=204, headers={"Retry-After": "0"})


@router.post("/runs", summary="Begin or resume a run")
async def begin_run(request: Request) -> Response:
    wanted = decode_body(await read_body(request), RunRequest)
    return json_response(context_of(request).broker.begin_run(wanted))


@router.post("/runs/{run_id}/finish", summary="End a run; its environments are told to stop")
async def finish_run(request: Request, run_id: str) -> Response:
    wanted = decode_body(await read_body(request), FinishRequest)
    context_of(request).broker.finish_run(run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@router.post("/batches/{number}/commit", summary="Everything up to this batch is covered by a checkpoint")
async def commit(request: Request, number: str) -> Response:
    wanted = decode_body(await read_body(request), CommitRequest)
    broker = context_of(request).broker
    broker.commit(parse_int(number, "number", least=1), run_id=wanted.run_id, epoch=wanted.epoch)
    return Response(status_code=204)


@router.post("/environments", summary="Register an environment by a stable name")
async def register_environment(request: Request) -> Response:
    wanted = decode_body(await read_body(request), EnvironmentRequest)
    return json_response(context_of(request).broker.register_environment(wanted))


def _until_retry(services: AppContext) -> float:
    """Return the seconds until a batch that waits for an environment's minimum may be formed without it."""
    retry_at = services.broker.batches.retry_at
    return float("inf") if retry_at is None else max(0.01, retry_at - services.broker.state.clock())


async def _batch_response(
    request: Request, services: AppContext, number: int, groups: list[GroupRow], form: Form
) -> Response:
    run_id = services.broker.state.runs.require_open().run_id
    bodies = await in_form(services.broker.read_bodies(groups), groups, form)
    pieces, headers = await encode_pieces(request, join_batch(number, run_id, bodies, form))
    return ChunkedResponse(pieces, media_type=MEDIA_TYPES[form], headers=headers)


policy_router = APIRouter(prefix="/v1/policy", tags=["v1"])


@policy_router.put("", summary="Announce a published policy version")
async def update_policy(request: Request) -> Response:
    update = decode_body(await read_body(request), PolicyUpdate)
    return json_response(context_of(request).broker.update_policy(update))


@policy_router.get("", summary="The published policy, and for how long evaluations ask to leave it so")
async def policy(request: Request) -> Response:
    services = context_of(request)
    run_id, epoch = request.query_params.get("run_id"), read_int(request, "epoch")
    wait = LongPoll(request, read_wait(request))
    while True:
        state = services.broker.policy_state(run_id, epoch)
        if not state.held_seconds or not await wait.on(services.pacing_bell, at_most=state.held_seconds):
            return json_response(state)


@policy_router.post("/hold", summary="Ask the trainer to publish no other policy for a while, or a while longer")
async def hold(request: Request) -> Response:
    wanted = decode_body(await read_body(request), HoldRequest)
    return json_response(context_of(request).broker.holds.hold(wanted))


@policy_router.delete("/hold/{hold_id}", summary="Give a hold back; the answer says whether the policy stayed")
async def release(request: Request, hold_id: str) -> Response:
    return json_response(context_of(request).broker.holds.release(hold_id))


@policy_router.delete("/hold", summary="End every hold")
async def release_all(request: Request) -> Response:
    context_of(request).broker.holds.release_all()
    return Response(status_code=204)


NUMBER: Final = in_path("number", FROM_ONE, "Number of the batch; the first is 1")

V1: Final = (
    Operation(
        method="POST",
        path="/v1/groups",
        help="All of one environment, as JSON or in binary columns. The whole request is taken or refused.",
        parameters=(KEY,),
        body=Submission,
        columns=True,
        example={"environment_id": 0, "groups": [EXAMPLE_GROUP]},
        answers={202: Answer(help="Kept: nothing of it is lost from here on", content=SubmitAnswer)},
        errors=(
            "invalid-request",
            "invalid-group",
            "unsupported-media-type",
            "unknown-environment",
            "queue-full",
            *WRITES,
        ),
    ),
    Operation(
        method="PUT",
        path="/v1/environments/{environment_id}/heartbeat",
        parameters=(
            in_path("environment_id", INTEGER, "As given at registration"),
            in_query("revision", INTEGER, "The pacing that the caller knows; it is told the next one"),
            WAIT,
        ),
        answers=ok(Pacing, "How much the environment should have under way"),
        errors=("invalid-request", "unknown-environment", *WRITES),
    ),
    Operation(
        method="PUT",
        path="/v1/environments/{environment_id}/dropped",
        help="Totals by reason since `session` began, so that a report may be repeated; /v1/status and /metrics show "
        "them.",
        parameters=(in_path("environment_id", INTEGER, "As given at registration"),),
        body=DropReport,
        example={
            "session": "5f0c2a",
            "groups": {"equal-scores": 96},
            "explanation": "96 groups scored, all dropped: every score is 0",
        },
        answers=NOTHING,
        errors=("invalid-request", "unknown-environment", *WRITES),
    ),
    Operation(
        method="GET",
        path="/v1/batches/{number}",
        help="Formed when it is first asked for; the same groups and bytes each time until it is committed. In binary "
        "columns where Accept names them.",
        parameters=(
            NUMBER,
            RUN_ID,
            EPOCH,
            WAIT,
            in_query("rank", COUNT | {"default": 0}, "Which slice of whole groups; below world_size"),
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
    ),
    Operation(
        method="POST",
        path="/v1/batches/{number}/commit",
        help="The groups of those batches may go. Harmless when repeated.",
        parameters=(NUMBER,),
        body=CommitRequest,
        example={"run_id": "run-0123456789ab", "epoch": 1},
        answers=NOTHING,
        errors=(*OPEN_RUN, "invalid-request", "batch-out-of-order", *WRITES),
    ),
    Operation(
        method="POST",
        path="/v1/runs",
        help="Closes the run that is open, unless it has another name and its trainer called lately: then take_over is "
        "needed. With resume, takes over the newest run of that name under a higher epoch.",
        body=RunRequest,
        example={"name": "demo", "batch_size": 16, "max_token_length": 2048, "num_steps": 40},
        answers=ok(RunInfo, "The run, and the number of its next batch"),
        errors=("invalid-request", "run-in-progress", *WRITES),
    ),
    Operation(
        method="POST",
        path="/v1/runs/{run_id}/finish",
        help="With its epoch a trainer ends only what no other has taken over. Harmless when repeated.",
        parameters=(in_path("run_id", TEXT_SCHEMA, "As given when the run began"),),
        body=FinishRequest,
        body_required=False,
        example={"epoch": 1},
        answers=NOTHING,
        errors=("unknown-run", "run-superseded", "invalid-request", *WRITES),
    ),
    Operation(
        method="POST",
        path="/v1/environments",
        help="The same name gets the same id, also after a restart of either side. Group sizes are judged together: "
        "while its own fills no batch, with those of others, the pacing has no room and says why.",
        body=EnvironmentRequest,
        example={"name": "gsm8k", "group_size": 8, "max_token_length": 2048},
        answers=ok(EnvironmentInfo, "The environment's id, and what it needs to know of the run"),
        errors=("invalid-request", "group-size-cannot-fill-batch", *WRITES),
    ),
    Operation(
        method="DELETE",
        path="/v1/environments/{environment_id}",
        help="Its weight and minimum count no more, and its groups stay usable. Any later call of it is a return.",
        parameters=(in_path("environment_id", INTEGER, "As given at registration"),),
        answers=NOTHING,
        errors=("invalid-request", "unknown-environment", *WRITES),
    ),
    Operation(
        method="PUT",
        path="/v1/policy",
        help="After each publish that succeeded. Versions rise; saying the same again is harmless.",
        body=PolicyUpdate,
        example={"run_id": "run-0123456789ab", "version": 7, "step": 6, "published_at": 1767225600.0},
        answers=ok(PolicyState, "What is published now, and how long it should stay"),
        errors=(*OPEN_RUN, "invalid-request", "policy-not-newer", *WRITES),
    ),
    Operation(
        method="GET",
        path="/v1/policy",
        help="With wait: answered as soon as nobody holds the policy.",
        parameters=(RUN_ID, EPOCH, WAIT),
        answers=ok(PolicyState, "What is published, and how long it should stay"),
        errors=(*OPEN_RUN, "invalid-request"),
    ),
    Operation(
        method="POST",
        path="/v1/policy/hold",
        body=HoldRequest,
        example={"seconds": 60, "reason": "evaluation"},
        answers=ok(Hold, "The lease"),
        errors=("invalid-request", "no-open-run", "unknown-hold", *WRITES),
    ),
    Operation(
        method="DELETE",
        path="/v1/policy/hold/{hold_id}",
        parameters=(in_path("hold_id", TEXT_SCHEMA, "As given when the hold was granted"),),
        answers=ok(Hold, "The lease as it ended"),
        errors=("no-open-run", "unknown-hold", *WRITES),
    ),
    Operation(method="DELETE", path="/v1/policy/hold", answers=NOTHING, errors=("no-open-run", *WRITES)),
)
