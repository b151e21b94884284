"""The OpenAPI document of the broker, made from the tables of `contract`."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atropos_api.errors import BrokerError
from atropos_api.http.contract import SECTIONS, Answer, Operation, Schema
from atropos_api.http.contract.pieces import COLUMNS_SCHEMA, JSON, TEXT, Content
from atropos_api.http.problems import PROBLEM_TYPE, STATUS_BY_KIND, STATUS_OF_TRANSPORT
from atropos_api.http.schemas import REFERENCE, components, schema_of
from atropos_api.wire.columns import MEDIA_TYPE as COLUMNS_TYPE

PROBLEM: Final[Schema] = {"$ref": REFERENCE.format(name="Problem")}
DESCRIPTION: Final = (
    "The trajectory broker: environments push scored groups, one trainer pulls numbered batches. One run is open at a "
    "time; a second concurrent run needs a second broker. Ids address things and authorise nothing: where it matters "
    "who calls, the broker has a token, sent as `Authorization: Bearer <token>` or as `/t/<token>` before the path. "
    "The v1 routes answer errors as problem+json, the Atropos contract as its clients know them."
)
ANY_ROUTE: Final = (
    "malformed-request",
    "cross-site-request",
    "request-timeout",
    "headers-too-large",
    "internal-error",
    "too-many-connections",
    "stopping",
)
ANY_BODY: Final = ("invalid-gzip", "body-too-large")
RETRIED: Final[Schema] = {"Retry-After": {"description": "Seconds", "schema": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of error: its status, and what it means in a sentence."""

    status: int
    meaning: str


@functools.cache
def known_problems() -> Mapping[str, Problem]:
    """Every kind of problem that this broker answers."""
    raised = {kind.kind: " ".join((kind.__doc__ or "").split()) for kind in _descendants(BrokerError)}
    problems = {kind: Problem(status, raised[kind]) for kind, status in STATUS_BY_KIND.items()}
    return problems | {kind: Problem(*described) for kind, described in STATUS_OF_TRANSPORT.items()}


def make_document(summaries: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The whole document; `summaries` are those of the routes, by method and path."""
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for tag, operations in SECTIONS.items():
        for operation in operations:
            described = {"summary": summaries[operation.method, operation.path], **_operation(operation, tag)}
            paths[operation.path][operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Atropos broker", "version": "1", "description": DESCRIPTION},
        "paths": dict(paths),
        "components": {
            "schemas": components() | ERROR_SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def errors_of(operation: Operation) -> dict[int, list[str]]:
    """Kinds of problems by status: the route's own, and those that it has for what it takes."""
    kinds = [*operation.errors, *ANY_ROUTE]
    if operation.body is not None:
        kinds += ANY_BODY
    if any(parameter.place == "path" for parameter in operation.parameters):
        kinds.append("not-found")
    if not operation.open_to_all:
        kinds.append("token-required")
    by_status: dict[int, list[str]] = defaultdict(list)
    for kind in dict.fromkeys(kinds):
        by_status[known_problems()[kind].status].append(kind)
    return dict(sorted(by_status.items()))


def _operation(operation: Operation, tag: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [tag],
        "operationId": "_".join(re.findall(r"\w+", f"{operation.method.lower()} {operation.path}")) or "root",
        "description": operation.help,
        "parameters": [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "schema": parameter.schema,
                "description": parameter.help,
            }
            for parameter in operation.parameters
        ],
        "responses": {str(status): answer for status, answer in _responses(operation)},
    }
    if operation.body is not None:
        content = _content(operation.body, JSON, operation.example, columns=operation.columns)
        described["requestBody"] = {"required": operation.body_required, "content": content}
    if operation.open_to_all:
        described["security"] = []
    return described


def _responses(operation: Operation) -> Iterator[tuple[int, dict[str, Any]]]:
    errors = errors_of(operation)
    for status in sorted({*operation.answers, *errors}):
        response: dict[str, Any] = {"description": "", "content": {}}
        if (answer := operation.answers.get(status)) is not None:
            response = _success(answer)
        if kinds := errors.get(status):
            own = [kind for kind in kinds if kind in operation.errors or kind in ANY_BODY]
            meanings = "; ".join(f"{kind}: {known_problems()[kind].meaning}" for kind in kinds)
            response["description"] = ". ".join(filter(None, (response["description"], meanings)))
            response["content"] = response.get("content", {}) | _error_content(operation, status, kinds, own)
        if status == 503:
            response["headers"] = RETRIED
        yield status, response


def _success(answer: Answer) -> dict[str, Any]:
    if answer.content is None:
        return {"description": answer.help}
    content = _content(answer.content, answer.media_type, answer.example, columns=answer.columns)
    return {"description": answer.help, "content": content}


def _error_content(operation: Operation, status: int, kinds: list[str], own: list[str]) -> dict[str, Any]:
    """Problems; under the Atropos contract what a rule raises comes in that contract's forms instead."""
    if operation.path.startswith("/v1/") or not own:
        return {PROBLEM_TYPE: {"schema": PROBLEM}}
    content: dict[str, Any] = {PROBLEM_TYPE: {"schema": PROBLEM}} if len(own) < len(kinds) else {}
    if status == 400:
        return content | {TEXT: {"schema": {"type": "string"}}}
    name = "LegacyValidationError" if status == 422 else "LegacyError"
    return content | {JSON: {"schema": {"$ref": REFERENCE.format(name=name)}}}


def _content(content: Content, media_type: str, example: Any, *, columns: bool) -> dict[str, Any]:
    schema = content if isinstance(content, dict) else schema_of(content)
    forms = {media_type: {"schema": schema} | ({} if example is None else {"example": example})}
    return forms | ({COLUMNS_TYPE: {"schema": COLUMNS_SCHEMA}} if columns else {})


def _descendants(kind: type[BrokerError]) -> Iterator[type[BrokerError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


ERROR_SCHEMAS: Final[dict[str, Schema]] = {
    "Problem": {
        "type": "object",
        "description": "RFC 9457; `type` is stable, further members name the offending field and value",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "field": {"type": "string"},
        },
    },
    "LegacyError": {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string"}}},
    "LegacyValidationError": {
        "type": "object",
        "required": ["detail"],
        "properties": {
            "detail": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["type", "loc", "msg"],
                    "properties": {
                        "type": {"type": "string"},
                        "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
                        "msg": {"type": "string"},
                    },
                },
            }
        },
    },
}
