"""What descriptions of routes are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from atropos_api.http.parameters import LONGEST_KEY, LONGEST_WAIT_SECONDS

Schema = dict[str, Any]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
HTML: Final = "text/html"
EVENTS: Final = "text/event-stream"

INTEGER: Final[Schema] = {"type": "integer", "minimum": -(10**18), "maximum": 10**18}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 10**18}
FROM_ONE: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 10**18}
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
    """A success: `content` is a type of the contract, or a schema; None for an empty body."""

    help: str
    content: type | Schema | None = None
    media_type: str = JSON
    example: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route. `errors` are the kinds of problems it raises itself, beside those that every route may answer."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    answers: Mapping[int, Answer]
    errors: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: type | Schema | None = None
    body_required: bool = True
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


def ok(content: type | Schema, help_: str = "Done", example: Any = None) -> dict[int, Answer]:
    return {200: Answer(help=help_, content=content, example=example)}


NOTHING: Final = {204: Answer(help="Done; there is nothing to say")}
OBJECT: Final[Schema] = {"type": "object"}
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

NUMERIC: Final[Schema] = {
    "anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "string"}],
    "description": "A finite number; text and booleans that stand for one are taken as it",
}
ROWS: Final[Schema] = {"type": "array", "items": {"type": "array", "items": NUMERIC, "minItems": 1}, "minItems": 1}
OPTIONAL_ROWS: Final[Schema] = {"type": ["array", "null"], "items": {"type": "array", "items": NUMERIC}}
DEEP_ROWS: Final[Schema] = {"type": ["array", "null"], "items": {"type": "array", "items": OPTIONAL_ROWS}}
GROUP: Final[Schema] = {
    "type": "object",
    "required": ["tokens", "masks", "scores"],
    "properties": {
        "tokens": ROWS | {"description": "One full sequence (prompt and completion) a rollout"},
        "masks": ROWS | {"description": "As tokens: -100 where nothing is trained, else the token"},
        "scores": {"type": "array", "items": NUMERIC, "minItems": 1, "description": "One a sequence"},
        "advantages": OPTIONAL_ROWS,
        "ref_logprobs": OPTIONAL_ROWS,
        "inference_logprobs": OPTIONAL_ROWS,
        "messages": {"type": ["array", "null"]},
        "generation_params": {"type": ["object", "null", "array"], "maxItems": 0},
        "overrides": {"type": ["array", "null"], "items": {"type": ["object", "null"]}},
        "group_overrides": {"type": ["object", "null", "array"], "maxItems": 0},
        "images": {},
        "env_id": {"description": "The environment that sent it; the broker fills it in under v1"},
        "distill_token_ids": DEEP_ROWS,
        "distill_logprobs": DEEP_ROWS,
        "policy_versions": {
            "type": ["array", "null"],
            "description": "Per sequence: [start, end, version] of its sampled tokens; version null: unknown",
        },
    },
    "description": "Rows of masks, logprobs and advantages are as long as those of tokens. Unknown keys survive.",
}
EXAMPLE_GROUP: Final[dict[str, Any]] = {
    "tokens": [[5, 6, 7], [5, 6, 8]],
    "masks": [[-100, 6, 7], [-100, 6, 8]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.1, -0.7], [1.0, -0.1, -1.2]],
}
