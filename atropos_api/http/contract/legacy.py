"""The routes of the Atropos contract."""

from __future__ import annotations

from typing import Final

from atropos_api.broker.legacy import LegacyEnvironment, LegacyRegistration
from atropos_api.broker.legacy_status import StatusEnv
from atropos_api.http.contract.pieces import (
    COUNT,
    EXAMPLE_GROUP,
    GROUP,
    INTEGER,
    KEY,
    OBJECT,
    TEXT,
    TEXT_SCHEMA,
    WRITES,
    Answer,
    Operation,
    Schema,
    in_query,
    object_of,
    ok,
)

TAKEN: Final[Schema] = {"type": "object", "properties": {"status": {"enum": ["received", "buffered"]}}}
ENV_ID: Final = object_of(env_id={"anyOf": [INTEGER, TEXT_SCHEMA]})

LEGACY: Final = (
    Operation(
        method="GET",
        path="/",
        answers=ok(object_of(message=TEXT_SCHEMA), "The name of the API", {"message": "AtroposLib API"}),
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
        answers=ok(object_of(uuid=COUNT), "An integer that is never asked for again"),
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
            object_of(status=TEXT_SCHEMA),
            "`success` and its id; or `wait for trainer to start`, or `wait: ...` with the sizes that fill no batch",
        ),
        errors=("invalid-request", "group-size-cannot-fill-batch", *WRITES),
    ),
    Operation(
        method="POST",
        path="/disconnect-env",
        body=ENV_ID,
        example={"env_id": 0},
        answers=ok(object_of(status={"enum": ["success", "failure"]}), "Failure means: no such environment"),
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
        body=GROUP,
        example=EXAMPLE_GROUP | {"env_id": 0},
        answers=ok(TAKEN, "Kept; buffered if no batch can use it yet", {"status": "received"}),
        errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
    ),
    Operation(
        method="POST",
        path="/scored_data_list",
        help="Valid groups are taken even where others of the list are refused (422 then names those).",
        parameters=(KEY,),
        body={"type": "array", "items": GROUP},
        example=[EXAMPLE_GROUP | {"env_id": 0}],
        answers=ok(TAKEN, "Kept", {"status": "received", "groups_processed": 1}),
        errors=("invalid-request", "invalid-group", "queue-full", *WRITES),
    ),
    Operation(
        method="GET",
        path="/batch",
        help="Commits the batch handed out before, if its answer was delivered whole.",
        answers=ok(
            {"type": "object", "properties": {"batch": {"type": ["array", "null"]}}, "required": ["batch"]},
            "The batch; null while there is none; `[]` with a status and a message before a trainer registered",
            {"batch": None},
        ),
        errors=("no-open-run", "batch-damaged", *WRITES),
    ),
    Operation(
        method="GET",
        path="/status",
        answers=ok(object_of(current_step=INTEGER, queue_size=COUNT), "Queue in groups"),
    ),
    Operation(
        method="GET",
        path="/info",
        answers=ok(
            object_of(batch_size=INTEGER, max_token_len=INTEGER),
            "-1 before a trainer registered; policy_name besides, where the newest policy has a model name of its own",
        ),
    ),
    Operation(
        method="GET",
        path="/wandb_info",
        answers=ok(object_of(group={"type": ["string", "null"]}, project={"type": ["string", "null"]})),
    ),
    Operation(method="GET", path="/latest_example", answers=ok(OBJECT, "The group that came last")),
    Operation(
        method="GET",
        path="/reset_data",
        help="Ends the run of whoever is at work. What it did not train stays on disk as left over and is served to no "
        "other run.",
        answers={200: Answer(help="Done", content=TEXT_SCHEMA, media_type=TEXT, example="Reset successful")},
        errors=WRITES,
    ),
)
