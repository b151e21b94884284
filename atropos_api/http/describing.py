"""`/docs` and `/openapi.json`: the contract for readers and for programs, without a script or a foreign host."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from atropos_api.http.bodies import JSON, json_response
from atropos_api.http.openapi import DESCRIPTION, known_problems
from atropos_api.http.problems import TYPE_PREFIX

router = APIRouter(tags=["operations"])

HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Frame-Options": "DENY"}
STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "h3{margin:2rem 0 .3rem}code,pre{font-family:ui-monospace,monospace;font-size:.9em}"
    "pre{padding:.6rem;overflow:auto;border:1px solid #8884}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8884}"
)


@router.get("/openapi.json", summary="This description, for programs")
async def openapi(request: Request) -> Response:
    return json_response(request.app.openapi())


@router.get("/docs", summary="This description, for readers")
async def docs(request: Request) -> Response:
    return Response("".join(_render(request.app.openapi())), media_type="text/html", headers=HEADERS)


def _render(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>Atropos broker</title><style>{STYLE}</style>"
    yield f"<h1>Atropos broker</h1><p>{_text(DESCRIPTION)}</p>"
    yield "<p>For programs: <a href=openapi.json>openapi.json</a>.</p>"
    tag = None
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{_text(tag)}</h2>"
            yield from _operation(method.upper(), path, operation)
    yield "<h2>Errors</h2><table><tr><th>type<th>status<th>meaning"
    for kind, problem in sorted(known_problems().items()):
        yield f"<tr id={kind}><td><code>{TYPE_PREFIX}{kind}</code><td>{problem.status}<td>{_text(problem.meaning)}"
    yield "</table></html>"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3><code>{method} {_text(path)}</code></h3>"
    yield f"<p>{_text(operation['summary'])}. {_text(operation['description'])}</p>"
    if operation["parameters"]:
        yield "<table>"
        for parameter in operation["parameters"]:
            name, place, about = (_text(parameter[key]) for key in ("name", "in", "description"))
            yield f"<tr><td><code>{name}</code><td>{place}<td>{about}"
        yield "</table>"
    example = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
    if example is not None:
        yield f"<pre>{_text(json.dumps(example))}</pre>"
    yield "<table>"
    for status, response in operation["responses"].items():
        forms = ", ".join(response.get("content", {}))
        yield f"<tr><td>{status}<td>{_text(response['description'])}<td>{_text(forms)}"
    yield "</table>"


def _text(text: str) -> str:
    return html.escape(text)
