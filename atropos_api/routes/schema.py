"""`Operation`, which declares a route with its description; the parts of descriptions; the types of small answers.

A field that may be `UNSET` is left out of the answer if it has no value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, TypeVar

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from msgspec import UNSET, Struct, UnsetType
from starlette.routing import BaseRoute

from atropos_api.http.request import JSON, LONGEST_KEY, LONGEST_WAIT_SECONDS
from atropos_api.http.streaming import LONG_WAIT_SECONDS, SHARED_END_SECONDS
from atropos_api.store.base import Event
from atropos_api.wire.groups import Group

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


HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Response]])


@dataclass(frozen=True, slots=True)
class Operation:
    """One route, declared by using its description as the decorator of its handler.

    `errors` are the kinds of problems it raises, in addition to those that every route may answer. With `columns` it
    also takes its body in binary columns.
    """

    router: APIRouter
    route: str
    """Method and path, as in `GET /v1/batches/{number}`."""
    summary: str
    _: KW_ONLY
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

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def section(self) -> str:
        return str(self.router.tags[0])

    def __call__(self, handler: HandlerT) -> HandlerT:
        """Add the handler's route to the router."""
        declare = self.router.api_route(self.path, methods=[self.method], openapi_extra={OPERATION_KEY: self})
        return declare(handler)


OPERATION_KEY: Final = "operation"


def operations_of(routes: Iterable[BaseRoute]) -> list[Operation]:
    """Return the descriptions of an application's routes, in the order in which the routes are tried."""
    return [
        route.openapi_extra[OPERATION_KEY] for route in routes if isinstance(route, APIRoute) and route.openapi_extra
    ]


def in_path(name: str, schema: Schema, help_: str) -> Parameter:
    return Parameter(name=name, place="path", schema=schema, help=help_)


def in_query(name: str, schema: Schema, help_: str) -> Parameter:
    return Parameter(name=name, place="query", schema=schema, help=help_)


def object_of(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def ok(content: Content, help_: str = "Done", example: Any = None) -> dict[int, Answer]:
    return {200: Answer(help=help_, content=content, example=example)}


NOTHING: Final = {204: Answer(help="Done; the answer has no body")}
OBJECT: Final[Schema] = {"type": "object"}

COLUMNS_SCHEMA: Final[Schema] = {
    "type": "string",
    "format": "binary",
    "description": "Binary columns: a prefix, a JSON head, and groups whose arrays of numbers have the layout of "
    "memory (docs/reference/columns.md).",
}

OPEN_RUN: Final = ("unknown-run", "no-open-run", "run-superseded")
WRITES: Final = ("store-unavailable",)

WAIT: Final = in_query(
    "wait",
    {"type": "number", "minimum": 0, "default": 0},
    f"Seconds to wait for a change, or for a batch; at most {LONGEST_WAIT_SECONDS:.0f}. A wait of "
    f"{LONG_WAIT_SECONDS:.0f} or more may end up to {SHARED_END_SECONDS:g} s early",
)

RUN_ID: Final = in_query("run_id", TEXT_SCHEMA, "The caller's run; if another one is open, the call is refused")
EPOCH: Final = in_query("epoch", INTEGER, "The epoch that the caller got with the run; an older one is refused")

KEY: Final = Parameter(
    name="Idempotency-Key",
    place="header",
    schema={"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
    help="A request whose key was used before is not accepted again, so repeating it is harmless",
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
    """Number of the environment's sequences, this group's included, that no batch can use yet."""


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


class RecentEvents(Struct, kw_only=True):
    """Events, and the id of the last one that has happened."""

    events: list[Event]
    last_id: int


class EnvironmentId(Struct):
    env_id: int


ENV_ID: Final = object_of(
    env_id={"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(0|-?[1-9][0-9]{0,17})$"}]}
)
