"""Content negotiation: the form that a body has, the form that is wanted, and stored groups in that form.

A group is stored in the form in which it was sent. If the other form is wanted, it is transcoded at each delivery, in a
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from fastapi import Request

from atropos_api.errors import NotAcceptable, UnsupportedMediaType
from atropos_api.http.request import COMPRESS_FROM_BYTES, JSON, RequestView, compress, wants_gzip
from atropos_api.store.base import GroupRow
from atropos_api.wire.columns import MEDIA_TYPE, VERSION, begin_body
from atropos_api.wire.columns_check import check_submission
from atropos_api.wire.columns_groups import columns_to_json, json_to_columns
from atropos_api.wire.group_json import CheckedGroup, check_group, decode_submission
from atropos_api.wire.groups import Form

MEDIA_TYPES: Final = {"json": JSON, "columns": f"{MEDIA_TYPE}; version={VERSION}"}
VARIES: Final[Mapping[str, str]] = {"Vary": "Accept, Accept-Encoding"}
THREAD_FROM_BYTES: Final = 1 << 18
"""Compressing less than this takes no longer than handing it to a thread."""


def form_of_body(view: RequestView) -> Form:
    """Return columns if Content-Type names them; anything else is read as JSON, as Atropos' own clients need it."""
    declared = view.header(b"content-type") or ""
    if declared == JSON:
        return "json"
    kind, parameters = _parse_media_type(declared)
    if kind != MEDIA_TYPE:
        return "json"
    if not _is_our_version(parameters):
        raise UnsupportedMediaType(
            f"Content-Type: this broker reads version {VERSION} of {MEDIA_TYPE} and application/json, got {declared!r}",
            field="Content-Type",
            value=declared[:80],
        )
    return "columns"


def wanted_form(request: Request) -> Form:
    """Return columns if Accept names them and ranks nothing higher; otherwise JSON, if Accept allows it."""
    accept = ",".join(request.headers.getlist("accept"))
    if not accept.strip():
        return "json"
    json_weight = columns_weight = 0.0
    for kind, parameters in map(_parse_media_type, accept.split(",")):
        if kind in {JSON, "application/*", "*/*"}:
            json_weight = max(json_weight, _weight(parameters))
        elif kind == MEDIA_TYPE and _is_our_version(parameters):
            columns_weight = max(columns_weight, _weight(parameters))
    if json_weight == columns_weight == 0.0:
        raise NotAcceptable(
            f"Accept: this broker answers application/json or {MEDIA_TYPES['columns']}, got {accept[:80]!r}",
            field="Accept",
            value=accept[:80],
        )
    return "columns" if columns_weight >= json_weight else "json"


def read_submission(body: bytes, form: Form) -> tuple[int, list[CheckedGroup]]:
    """Return the environment's id and its checked groups."""
    if form == "columns":
        return check_submission(body)
    submission = decode_submission(body)
    env_id = submission.environment_id
    groups = [
        check_group(fields, where=f"groups[{index}].", env_id=env_id) for index, fields in enumerate(submission.groups)
    ]
    return env_id, groups


async def in_form(bodies: list[bytes], groups: Sequence[GroupRow], form: Form) -> list[bytes]:
    """Return the bodies of these groups in `form`; those stored in the other form are transcoded."""
    if all(group.form == form for group in groups):
        return bodies
    forms = [group.form for group in groups]
    return await asyncio.to_thread(lambda: list(_transcode(bodies, forms, form)))


async def latest_as_json(body: bytes, form: Form) -> bytes:
    return body if form == "json" else await asyncio.to_thread(columns_to_json, body)


def join_batch(number: int, run_id: str, policy: str, bodies: Sequence[bytes], form: Form) -> list[bytes]:
    head = b'{"number":%d,"run_id":"%b","policy":%b' % (number, run_id.encode(), msgspec.json.encode(policy))
    if form == "columns":
        return [begin_body(head + b"}", len(bodies)), *bodies]
    return join_texts(head + b',"groups":[', bodies)


def join_texts(head: bytes, bodies: Sequence[bytes]) -> list[bytes]:
    """Return the pieces of a JSON object that ends in an array of these texts."""
    pieces = [head]
    for index, body in enumerate(bodies):
        pieces += (b",", body) if index else (body,)
    return [*pieces, b"]}"]


async def encode_pieces(request: Request, pieces: Sequence[bytes]) -> tuple[Sequence[bytes], Mapping[str, str]]:
    """Return the body as it is sent, compressed or not, and the headers that say so."""
    size = sum(map(len, pieces))
    if size < COMPRESS_FROM_BYTES or not wants_gzip(request.headers.get("accept-encoding", "")):
        return pieces, VARIES
    if size >= THREAD_FROM_BYTES:
        pieces = await asyncio.to_thread(compress, pieces)
    else:
        pieces = compress(pieces)
    return pieces, {**VARIES, "Content-Encoding": "gzip"}


def _transcode(bodies: Sequence[bytes], forms: Sequence[Form], wanted: Form) -> Iterator[bytes]:
    change = columns_to_json if wanted == "json" else json_to_columns
    for body, form in zip(bodies, forms, strict=True):
        yield body if form == wanted else change(body)


def _parse_media_type(text: str) -> tuple[str, dict[str, str]]:
    kind, *parameters = (part.strip().lower() for part in text.split(";"))
    pairs = (parameter.partition("=") for parameter in parameters)
    return kind, {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _is_our_version(parameters: dict[str, str]) -> bool:
    return parameters.get("version", str(VERSION)) == str(VERSION)


def _weight(parameters: dict[str, str]) -> float:
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
