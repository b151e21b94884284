"""The files of the live page: its HTML at `/` for browsers, the rest below `/page`; the data that it shows come from
`watch` and `ops`. All addresses in it are relative.
"""

from __future__ import annotations

import functools
from typing import Final

from fastapi import APIRouter, Request, Response

from atropos_api.http.auth import ORIGINAL_PATH
from atropos_api.http.problems import problem_response
from atropos_api.page.files import HEADERS, INDEX, PageFile, page_files
from atropos_api.routes.schema import TEXT_SCHEMA, Answer, Operation, in_path

router = APIRouter(tags=["watching"])

route = functools.partial(Operation, router)

FILE: Final = {200: Answer(help="The file", content=TEXT_SCHEMA), 304: Answer(help="The caller's file is the newest")}


@route(
    "GET /page/{name}",
    "A file of the live page",
    parameters=(in_path("name", TEXT_SCHEMA, "Name of the file"),),
    answers=FILE,
)
async def file(request: Request, name: str) -> Response:
    return _answer(request, name)


@route(
    "GET /page/vendor/{name}",
    "A file of others that the live page uses",
    parameters=(in_path("name", TEXT_SCHEMA, "Name of the file"),),
    answers=FILE,
)
async def vendor_file(request: Request, name: str) -> Response:
    return _answer(request, f"vendor/{name}")


def answer_page(request: Request) -> Response:
    """Return the page, or a redirect to its address with a slash at the end, below which its files are."""
    path: str = request.scope.get(ORIGINAL_PATH, request.scope["path"])
    if not path.endswith("/"):
        location = f"{path.rpartition('/')[2]}/"
        return Response(status_code=307, headers={"Location": location, "Cache-Control": "no-store"})
    return _answer(request, INDEX)


def _answer(request: Request, name: str) -> Response:
    found = page_files().get(name)
    if found is None:
        return problem_response(404, "not-found", f"the page has no file {name[:80]!r}")
    return _send(found, request.headers.get("if-none-match"))


def _send(found: PageFile, known: str | None) -> Response:
    headers = {**HEADERS, "ETag": found.etag, "Vary": "Accept"}
    if known == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
