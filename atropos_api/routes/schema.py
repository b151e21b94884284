"""The parts of route descriptions, and types of the answers that handlers write without a type of their own.

The types serve the description and the tests. A field that may be `UNSET` is left out if it has no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from atropos_api.broker.counters import Counters
from atropos_api.broker.status import StatusEnv
from atropos_api.http.request import (
    JSON,
    LONGEST_KEY,
    LONGEST_WAIT_SECONDS,
)
from atropos_api.store.base import RunRow
from atropos_api.wire.groups import Group

__all__ = [
    "EnvironmentLeft",
    "EnvironmentRegistered",
    "GroupTaken",
    "GroupsTaken",
    "Health",
    "NextBatch",
    "NoExample",
    "Status",
    "StatusEnv",
    "StepAndQueue",
    "TrainerFacts",
    "TrainerRegistered",
    "WandbFacts",
    "Welcome",
]

Schema = dict[str, Any]

Content = Any
"""A type that msgspec knows, a tuple of alternative types, or a schema."""

TEXT: Final = "text/plain"

HTML: Final = "text/html"

EVENTS: Final = "text/event-stream"

LARGEST: Final = 10**18 - 1

INTEGER: Final[Schema] = {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}

COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": LARGEST}

FROM_ONE: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": LARGEST}

TEXT_SCHEMA: Final[Schema] = {"type": "string"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One value in the path, the query or a header."""

    name: str
    place: Literal["path", "query", "header"]
    schema: Schema
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A success: `content` is a type of the contract, or a schema; None for an empty body.

    With `columns` it is also answered in binary columns.
    """

    help: str
    content: Content | None = None
    media_type: str = JSON
    example: Any = None
    columns: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route: `errors` are the kinds of problems it raises, in addition to those that every route may answer.

    With `columns` it also takes its body in binary columns.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    answers: Mapping[int, Answer]
    errors: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: Content | None = None
    body_required: bool = True
    columns: bool = False
    example: Any = None
    help: str = ""
    open_to_all: bool = False
    """True if it is answered without a token."""


def in_path(name: str, schema: Schema, help_: str) -> Parameter:
    return Parameter(name=name, place="path", schema=schema, help=help_)


def in_query(name: str, schema: Schema, help_: str) -> Parameter:
    return Parameter(name=name, place="query", schema=schema, help=help_)


def object_of(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def ok(content: Content, help_: str = "Done", example: Any = None) -> dict[int, Answer]:
    return {200: Answer(help=help_, content=content, example=example)}


NOTHING: Final = {204: Answer(help="Done; there is nothing to say")}

OBJECT: Final[Schema] = {"type": "object"}

COLUMNS_SCHEMA: Final[Schema] = {
    "type": "string",
    "format": "binary",
    "description": "Binary columns: a prefix, a JSON head, and groups whose arrays of numbers come as they lie in "
    "memory (docs/reference/columns.md).",
}

OPEN_RUN: Final = ("unknown-run", "no-open-run", "run-superseded")

WRITES: Final = ("store-unavailable",)

WAIT: Final = in_query(
    "wait",
    {"type": "number", "minimum": 0, "default": 0},
    f"Seconds to wait for an answer that says more; at most {LONGEST_WAIT_SECONDS:.0f} are granted",
)

RUN_ID: Final = in_query("run_id", TEXT_SCHEMA, "The run that is meant; any other open one is refused")

EPOCH: Final = in_query("epoch", INTEGER, "The epoch that the caller was given; a later trainer's differs")

KEY: Final = Parameter(
    name="Idempotency-Key",
    place="header",
    schema={"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
    help="Under a key that was used before nothing is taken again, so that a request may be repeated",
)

EXAMPLE_GROUP: Final[dict[str, Any]] = {
    "tokens": [[5, 6, 7], [5, 6, 8]],
    "masks": [[-100, 6, 7], [-100, 6, 8]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.1, -0.7], [1.0, -0.1, -1.2]],
}


class Welcome(Struct, kw_only=True):
    message: str


class TrainerRegistered(Struct, kw_only=True):
    uuid: int


class EnvironmentRegistered(Struct, kw_only=True):
    """The answer to a registration: only `success` has the other fields; any other status says what to wait for."""

    status: str
    env_id: int | UnsetType = UNSET
    wandb_name: str | UnsetType = UNSET
    checkpoint_dir: str | UnsetType = UNSET
    starting_step: int | UnsetType = UNSET
    checkpoint_interval: int | UnsetType = UNSET
    num_steps: int | UnsetType = UNSET


class EnvironmentLeft(Struct, kw_only=True):
    status: Literal["success", "failure"]
    error: str | UnsetType = UNSET


class GroupTaken(Struct, kw_only=True):
    status: Literal["received", "buffered"]
    buffer_size: int | UnsetType = UNSET
    """Sequences of the environment that are buffered, like this group."""


class GroupsTaken(Struct, kw_only=True):
    status: Literal["received"]
    groups_processed: int
    buffered: int | UnsetType = UNSET
    last_buffer_size: int | UnsetType = UNSET


class NextBatch(Struct, kw_only=True):
    """The next batch: null while none can be formed, and `[]` with status and message before a trainer registered."""

    batch: list[Group] | None
    status: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class StepAndQueue(Struct, kw_only=True):
    current_step: int
    queue_size: int


class TrainerFacts(Struct, kw_only=True):
    batch_size: int
    max_token_len: int
    policy_name: str | UnsetType = UNSET


class WandbFacts(Struct, kw_only=True):
    group: str | None
    project: str | None


class NoExample(Struct, kw_only=True):
    """The answer before any group came: an empty list under each key."""

    tokens: list[Any]
    masks: list[Any]
    scores: list[Any]
    advantages: list[Any]
    ref_logprobs: list[Any]
    generation_params: list[Any]
    inference_logprobs: list[Any]
    messages: list[Any]
    images: list[Any]


class Health(Struct, kw_only=True):
    status: str
    detail: str | UnsetType = UNSET


class HeldPolicy(Struct, kw_only=True):
    seconds: float
    version: int | None
    reason: str


class RunStatus(RunRow, kw_only=True):
    """The open run, or else the one that finished last."""

    holds: tuple[HeldPolicy, ...]  # type: ignore[assignment] # without the ids, which suffice to end a hold
    current_step: int
    next_batch: int


class QueueStatus(Struct, kw_only=True):
    groups: int
    sequences: int
    bytes: int
    oldest_age_seconds: float | None
    unpackable_sizes: list[int]
    unpackable_groups: int


class BatchesStatus(Struct, kw_only=True):
    uncommitted: dict[str, int]
    """Sequences by batch number."""
    outstanding_sequences: int


class LatestDrop(Struct, kw_only=True):
    explanation: str
    time: float


class EnvironmentStatus(Struct, kw_only=True):
    environment_id: int
    name: str
    group_size: int
    weight: float
    connected: bool
    quiet_seconds: float
    queued_sequences: int
    dropped_groups: dict[str, int]
    latest_drop: LatestDrop | None


class StoreStatus(Struct, kw_only=True):
    bytes: int


class Status(Struct, kw_only=True):
    """The whole status of a broker: run, policy, queue, environments, counters."""

    time: float
    run: RunStatus | None
    queue: QueueStatus
    batches: BatchesStatus
    environments: list[EnvironmentStatus]
    left_over_groups: dict[str, int]
    store: StoreStatus
    dropped_groups: dict[str, int]
    counters: Counters


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


class EnvironmentId(msgspec.Struct):
    env_id: int


ENV_ID: Final = object_of(
    env_id={"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(0|-?[1-9][0-9]{0,17})$"}]}
)
