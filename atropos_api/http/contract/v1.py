"""The routes of the v1 contract."""

from __future__ import annotations

from typing import Final

from atropos_api.http.contract.pieces import (
    COUNT,
    EPOCH,
    EXAMPLE_GROUP,
    FROM_ONE,
    GROUP,
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
    object_of,
    ok,
)
from atropos_api.wire.groups import Batch
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
    SubmitAnswer,
)

NUMBER: Final = in_path("number", FROM_ONE, "Number of the batch; the first is 1")

V1: Final = (
    Operation(
        method="POST",
        path="/v1/groups",
        help="All of one environment, as JSON or in binary columns. The whole request is taken or refused.",
        parameters=(KEY,),
        body=object_of(environment_id=INTEGER, groups={"type": "array", "items": GROUP}),
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
            200: Answer(help="The batch, or this rank's slice of it", content=Batch),
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
        errors=("invalid-request", "no-open-run", "unknown-hold"),
    ),
    Operation(
        method="DELETE",
        path="/v1/policy/hold/{hold_id}",
        parameters=(in_path("hold_id", TEXT_SCHEMA, "As given when the hold was granted"),),
        answers=ok(Hold, "The lease as it ended"),
        errors=("no-open-run", "unknown-hold"),
    ),
    Operation(method="DELETE", path="/v1/policy/hold", answers=NOTHING),
)
