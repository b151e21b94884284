"""What descriptions of routes are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from atropos_api.http.parameters import LONGEST_KEY, LONGEST_WAIT_SECONDS

Schema = dict[str, Any]
Content = Any
"""A type that msgspec knows, a tuple of such that are alternatives, or a schema."""

JSON: Final = "application/json"
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

    With `columns` it is answered in binary columns too.
    """

    help: str
    content: Content | None = None
    media_type: str = JSON
    example: Any = None
    columns: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route. `errors` are the kinds of problems it raises itself, beside those that every route may answer.

    With `columns` it takes its body in binary columns too.
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
    """Answered without a token."""


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
