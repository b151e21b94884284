"""The description of every route: the OpenAPI document, `/openapi.json` for programs and `/docs` for readers.

All follow, as the reference page does, from the `Operation` that declares each route: what it takes, answers and
refuses. Handlers parse requests themselves, for speed, so tests compare these descriptions with their real answers.
Schemas are kept to what generators of clients understand; `/docs` has no script and loads nothing from another host.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.common.html_pages import POLICY, as_html, make_page
from atropos_api.errors import BrokerError
from atropos_api.http.problems import PROBLEM_TYPE, STATUS_BY_KIND, STATUS_OF_TRANSPORT, TYPE_PREFIX
from atropos_api.http.request import JSON, json_response
from atropos_api.routes.schema import (
    COLUMNS_SCHEMA,
    HTML,
    OBJECT,
    TEXT,
    TEXT_SCHEMA,
    Answer,
    Content,
    Operation,
    Schema,
    object_of,
    ok,
)
from atropos_api.wire.columns import MEDIA_TYPE as COLUMNS_TYPE

REFERENCE: Final = "#/components/schemas/{name}"


def schema_of(content: Any) -> Schema:
    """Return the schema of what a route takes or answers; types of the contract are referenced."""
    if isinstance(content, dict):
        return content
    if isinstance(content, tuple):
        return {"anyOf": [schema_of(one) for one in content]}
    schema: Schema = _plain(msgspec.json.schema_components([content], ref_template=REFERENCE)[0][0])
    return schema


def components(operations: Iterable[Operation]) -> dict[str, Schema]:
    """Return the types of the contract by name, each field with its own description."""
    types = list({repr(content): content for operation in operations for content in _types_of(operation)}.values())
    kinds = {kind.__name__: kind for kind in _structs(msgspec.inspect.multi_type_info(types))}
    _, found = msgspec.json.schema_components(types, ref_template=REFERENCE)
    return {name: _described(_plain(schema), kinds.get(name)) for name, schema in found.items()}


def _types_of(operation: Operation) -> Iterator[Any]:
    for content in (operation.body, *(answer.content for answer in operation.answers.values())):
        if content is not None and not isinstance(content, dict):
            yield from content if isinstance(content, tuple) else (content,)


def _plain(schema: Any) -> Any:
    """Return the schema without valid parts that few programs understand: `prefixItems`, null defaults, bare arrays."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain(value) for key, value in schema.items() if not (key == "default" and value is None)}
    if "prefixItems" in plain:
        members = plain.pop("prefixItems")
        plain["items"] = {"anyOf": [one for index, one in enumerate(members) if one not in members[:index]]}
    elif plain.get("type") == "array":
        plain.setdefault("items", {})
    return plain


def _described(schema: Schema, kind: type | None) -> Schema:
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for name, text in _field_docs(kind).items() if kind is not None else ():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    return schema


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class, those of its bases included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        if owner.__module__.partition(".")[0] != __name__.partition(".")[0]:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = text.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[field.target.id] = " ".join(value.value.split())
    return docs


def _structs(found: Any) -> Iterator[type]:
    """Yield the classes that msgspec found in types, however deep."""
    waiting, seen = list(found), set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if one.cls in seen:
                continue
            seen.add(one.cls)
            yield one.cls
            waiting += [field.type for field in one.fields]
        else:
            parts = (getattr(one, name, ()) for name in ("types", "item_type", "item_types", "value_type"))
            for part in parts:
                waiting += part if isinstance(part, tuple | list) else [part]


PROBLEM: Final[Schema] = {"$ref": REFERENCE.format(name="Problem")}

DESCRIPTION: Final = (
    "The trajectory broker: environments push scored groups, one trainer pulls numbered batches. One run is open at a "
    "time; a second concurrent run needs a second broker. Ids identify objects and grant no rights; a broker that "
    "restricts access requires a token, sent as `Authorization: Bearer <token>` or as `/t/<token>` before the path. "
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
    "token-required",
)

ANY_BODY: Final = ("invalid-gzip", "body-too-large")
RETRIED: Final[Schema] = {"Retry-After": {"description": "Seconds", "schema": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of error: it has a status, and its meaning in a sentence."""

    status: int
    meaning: str


@functools.cache
def known_problems() -> Mapping[str, Problem]:
    """Return every kind of problem that this broker answers."""
    raised = {kind.kind: " ".join((kind.__doc__ or "").split()) for kind in _descendants(BrokerError)}
    problems = {kind: Problem(status, raised[kind]) for kind, status in STATUS_BY_KIND.items()}
    return problems | {kind: Problem(*described) for kind, described in STATUS_OF_TRANSPORT.items()}


def make_document(operations: Sequence[Operation]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in operations:
        paths[operation.path][operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Atropos broker", "version": "1", "description": DESCRIPTION},
        "paths": dict(paths),
        "components": {
            "schemas": components(operations) | ERROR_SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def errors_of(operation: Operation) -> dict[int, list[str]]:
    """Return the kinds of problems by status: the route's own, and those that follow from what it takes."""
    kinds = [*operation.errors, *ANY_ROUTE]
    if operation.body is not None:
        kinds += ANY_BODY
    if any(parameter.place == "path" for parameter in operation.parameters):
        kinds.append("not-found")
    if operation.open_to_all:
        kinds.remove("token-required")
    return by_status(kinds)


def by_status(kinds: Iterable[str]) -> dict[int, list[str]]:
    """Return these kinds of problems under their statuses."""
    found: dict[int, list[str]] = defaultdict(list)
    for kind in dict.fromkeys(kinds):
        found[known_problems()[kind].status].append(kind)
    return dict(sorted(found.items()))


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.section],
        "summary": operation.summary,
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
    """Return the content of errors: problem+json, or the Atropos contract's forms for what its rules raise."""
    if operation.path.startswith("/v1/") or not own:
        return {PROBLEM_TYPE: {"schema": PROBLEM}}
    content: dict[str, Any] = {PROBLEM_TYPE: {"schema": PROBLEM}} if len(own) < len(kinds) else {}
    if status == 400:
        return content | {TEXT: {"schema": {"type": "string"}}}
    name = "LegacyValidationError" if status == 422 else "LegacyError"
    return content | {JSON: {"schema": {"$ref": REFERENCE.format(name=name)}}}


def _content(content: Content, media_type: str, example: Any, *, columns: bool) -> dict[str, Any]:
    forms = {media_type: {"schema": schema_of(content)} | ({} if example is None else {"example": example})}
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
        "properties": dict.fromkeys(("type", "title", "detail", "field"), TEXT_SCHEMA)
        | {"status": {"type": "integer"}},
    },
    "LegacyError": object_of(detail=TEXT_SCHEMA),
    "LegacyValidationError": object_of(
        detail={
            "type": "array",
            "items": object_of(
                type=TEXT_SCHEMA,
                loc={"type": "array", "items": {"type": ["string", "integer"]}},
                msg=TEXT_SCHEMA,
            ),
        }
    ),
}

router = APIRouter(tags=["operations"])

route = functools.partial(Operation, router)

HEADERS: Final = {"Content-Security-Policy": POLICY, "X-Frame-Options": "DENY"}


@route(
    "GET /openapi.json",
    "The API description as OpenAPI JSON",
    answers=ok(OBJECT, "This document"),
)
async def openapi(request: Request) -> Response:
    return json_response(request.app.openapi())


@route(
    "GET /docs",
    "The API description as a page",
    answers={200: Answer(help="This document as a page", content=TEXT_SCHEMA, media_type=HTML)},
)
async def docs(request: Request) -> Response:
    page = make_page("Atropos broker", "".join(_render(request.app.openapi())))
    return Response(page, media_type="text/html", headers=HEADERS)


def _render(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p>{as_html(DESCRIPTION)}</p>"
    yield "<p>For programs: <a href=openapi.json>openapi.json</a>.</p>"
    tag = None
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{as_html(tag)}</h2>"
            yield from _render_operation(method.upper(), path, operation)
    yield "<h2>Errors</h2><table><tr><th>type<th>status<th>meaning"
    for kind, problem in sorted(known_problems().items()):
        yield f"<tr id={kind}><td><code>{TYPE_PREFIX}{kind}</code><td>{problem.status}<td>{as_html(problem.meaning)}"
    yield "</table>"


def _render_operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3><code>{method} {as_html(path)}</code></h3>"
    yield f"<p>{as_html(operation['summary'])}. {as_html(operation['description'])}</p>"
    if operation["parameters"]:
        yield "<table>"
        for parameter in operation["parameters"]:
            name, place, about = (as_html(parameter[key]) for key in ("name", "in", "description"))
            yield f"<tr><td><code>{name}</code><td>{place}<td>{about}"
        yield "</table>"
    example = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
    if example is not None:
        yield f'<pre class="turn">{as_html(json.dumps(example))}</pre>'
    yield "<table>"
    for status, response in operation["responses"].items():
        forms = ", ".join(response.get("content", {}))
        yield f"<tr><td>{status}<td>{as_html(response['description'])}<td>{as_html(forms)}"
    yield "</table>"
