"""The routes of the Atropos contract."""

from __future__ import annotations

from typing import Final

from atropos_api.broker.legacy import LegacyEnvironment, LegacyRegistration
from atropos_api.http.contract.answers import (
    EnvironmentLeft,
    EnvironmentRegistered,
    GroupsTaken,
    GroupTaken,
    NextBatch,
    NoExample,
    StatusEnv,
    StepAndQueue,
    TrainerFacts,
    TrainerRegistered,
    WandbFacts,
    Welcome,
)
from atropos_api.http.contract.pieces import (
    EXAMPLE_GROUP,
    INTEGER,
    KEY,
    TEXT,
    TEXT_SCHEMA,
    WRITES,
    Answer,
    Operation,
    in_query,
    object_of,
    ok,
)
from atropos_api.wire.groups import Group

ENV_ID: Final = object_of(
    env_id={"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(0|-?[1-9][0-9]{0,17})$"}]}
)

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
