"""Routes for operators and monitoring: health, status, the latest group, and server-sent events.

A watcher of `/v1/events` that reconnects with `Last-Event-ID` misses nothing. Nothing is kept for a watcher: each reads
the broker's ring of recent events at its own pace. One that reads too slowly is closed like every stalled connection,
and one that reconnects too late gets an event `missed`. `WATCHING` describes these routes, the metrics and the
description itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from atropos_api.broker.status import describe_status
from atropos_api.http.content_negotiation import latest_as_json
from atropos_api.http.context import AppContext, context_of
from atropos_api.http.request import JSON, json_response, parse_int
from atropos_api.routes.schema import (
    EVENTS,
    HTML,
    OBJECT,
    TEXT,
    TEXT_SCHEMA,
    Answer,
    Health,
    Operation,
    Parameter,
    Schema,
    Status,
    in_query,
    ok,
)
from atropos_api.store.base import Event
from atropos_api.wire.groups import Group

router = APIRouter(tags=["operations"])


@router.get("/livez", summary="The process answers")
@router.get("/health", summary="The process answers")
async def live() -> Response:
    return json_response({"status": "ok"})


@router.get("/readyz", summary="Submissions would be kept")
async def ready(request: Request) -> Response:
    services = context_of(request)
    reason = services.why_not_ready()
    if reason is None:
        return json_response({"status": "ready"})
    if services.stopping:
        return json_response({"status": "stopping"}, status_code=503)
    return json_response({"status": "store unavailable", "detail": reason}, status_code=503)


@router.get("/v1/status", summary="Run, policy, queue, environments, counters")
async def status(request: Request) -> Response:
    return json_response(describe_status(context_of(request).broker))


@router.get("/v1/groups/latest", summary="The group that came last")
async def latest_group(request: Request) -> Response:
    state = context_of(request).broker.state
    if state.latest_body is None:
        return Response(status_code=204)
    return Response(await latest_as_json(state.latest_body, state.latest_form), media_type=JSON)


KEEP_ALIVE_SECONDS: Final = 15.0

GATHER_SECONDS: Final = 0.5
"""Events are gathered for this long and sent together, so that a watcher costs the same however many there are."""


@router.get("/v1/events", summary="Server-sent events, resumable by Last-Event-ID")
async def events(request: Request) -> Response:
    services = context_of(request)
    last = request.headers.get("last-event-id") or request.query_params.get("after")
    after = parse_int(last, "Last-Event-ID", least=0) if last else services.broker.state.events.last_id
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(services, after), media_type="text/event-stream", headers=headers)


async def _stream(services: AppContext, after: int) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    log = services.broker.state.events
    while True:
        # 0 asks for all events that are still known, so none can be missed.
        lot = _encode_missed(after) if after and log.has_forgotten(after) else b""
        lot += b"".join(map(_encode, log.after(after)))
        after = log.last_id
        yield lot + _encode_status(services, after)
        rung = await services.events_bell.wait(KEEP_ALIVE_SECONDS)
        await services.stop_bell.wait(GATHER_SECONDS if rung else 0.0)
        if services.stopping:
            return
        if not rung:
            yield b": keep-alive\n\n"


def _encode(event: Event) -> bytes:
    data = msgspec.json.encode({"time": event.time, **event.data})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.type.encode(), data)


def _encode_missed(after: int) -> bytes:
    return b'event: missed\ndata: {"after":%d}\n\n' % after


def _encode_status(services: AppContext, event_id: int) -> bytes:
    """Encode the whole status, sent after each lot of events so that a watcher needs no second source."""
    return b"id: %d\nevent: status\ndata: %s\n\n" % (event_id, services.status_text(_describe))


def _describe(services: AppContext) -> bytes:
    return msgspec.json.encode(describe_status(services.broker))


EVENT_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9]{1,18}$"}

ALIVE: Final = ok(Health, "The process answers", {"status": "ok"})

WATCHING: Final = (
    Operation(
        method="GET", path="/livez", answers=ok(Health, "The process answers", {"status": "ok"}), open_to_all=True
    ),
    Operation(
        method="GET", path="/health", answers=ok(Health, "The same as /livez", {"status": "ok"}), open_to_all=True
    ),
    Operation(
        method="GET",
        path="/readyz",
        answers={
            200: Answer(help="Submissions would be kept", content=Health, example={"status": "ready"}),
            503: Answer(
                help="They would not: the store takes no writes, the broker waits as a standby, or it is being stopped",
                content=Health,
                example={"status": "stopping"},
            ),
        },
        open_to_all=True,
    ),
    Operation(
        method="GET",
        path="/metrics",
        answers={
            200: Answer(help="Counters and gauges in Prometheus' text form", content=TEXT_SCHEMA, media_type=TEXT)
        },
    ),
    Operation(method="GET", path="/v1/status", answers=ok(Status, "Run, policy, queue, environments, counters")),
    Operation(
        method="GET",
        path="/v1/groups/latest",
        answers={
            200: Answer(help="The group that came last, as it is delivered", content=Group),
            204: Answer(help="None came yet"),
        },
    ),
    Operation(
        method="GET",
        path="/v1/events",
        help="Events carry ids; a watcher that names the last one it saw gets those it missed, or an event `missed` "
        "if they are no longer known. An event `status` with the whole of /v1/status follows each lot.",
        parameters=(
            Parameter(
                name="Last-Event-ID", place="header", schema=EVENT_ID, help="The last event seen, as browsers send it"
            ),
            in_query("after", EVENT_ID, "The same, for those who cannot set the header"),
        ),
        answers={200: Answer(help="Server-sent events without an end", content=TEXT_SCHEMA, media_type=EVENTS)},
        errors=("invalid-request",),
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        answers=ok(OBJECT, "This document"),
    ),
    Operation(
        method="GET",
        path="/docs",
        answers={200: Answer(help="This document, to be read", content=TEXT_SCHEMA, media_type=HTML)},
    ),
)
