"""Routes for operators and monitoring: health, status, the latest group, and server-sent events.

A watcher of `/v1/events` that reconnects with `Last-Event-ID` misses nothing. Nothing is kept for a watcher: each reads
the broker's ring of recent events at its own pace. One that reads too slowly is closed like every stalled connection,
and one that reconnects too late gets an event `missed`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from atropos_api.broker.status import Status, describe_status
from atropos_api.http.content_negotiation import latest_as_json
from atropos_api.http.context import AppContext, context_of
from atropos_api.http.request import JSON, json_response, parse_int
from atropos_api.routes.schema import (
    EVENTS,
    TEXT_SCHEMA,
    Answer,
    Health,
    Operation,
    Parameter,
    Schema,
    in_query,
    ok,
)
from atropos_api.store.base import Event
from atropos_api.wire.groups import Group

router = APIRouter(tags=["operations"])

route = functools.partial(Operation, router)


@route(
    "GET /health",
    "The process is alive",
    answers=ok(Health, "The same as /livez", {"status": "ok"}),
    open_to_all=True,
)
@route(
    "GET /livez",
    "The process is alive",
    answers=ok(Health, "The process is alive", {"status": "ok"}),
    open_to_all=True,
)
async def live() -> Response:
    return json_response({"status": "ok"})


@route(
    "GET /readyz",
    "The broker is ready for submissions",
    answers={
        200: Answer(help="The broker is ready for submissions", content=Health, example={"status": "ready"}),
        503: Answer(
            help="Not ready: the store accepts no writes, the broker is a standby, or it is being stopped",
            content=Health,
            example={"status": "stopping"},
        ),
    },
    open_to_all=True,
)
async def ready(request: Request) -> Response:
    context = context_of(request)
    reason = context.why_not_ready()
    if reason is None:
        return json_response({"status": "ready"})
    if context.stopping:
        return json_response({"status": "stopping"}, status_code=503)
    return json_response({"status": "store unavailable", "detail": reason}, status_code=503)


@route(
    "GET /v1/status",
    "Run, policy, queue, environments, counters",
    answers=ok(Status, "Run, policy, queue, environments, counters"),
)
async def status(request: Request) -> Response:
    return json_response(describe_status(context_of(request).broker))


@route(
    "GET /v1/groups/latest",
    "The latest group",
    answers={
        200: Answer(help="The latest group, as it is delivered", content=Group),
        204: Answer(help="No group has been accepted yet"),
    },
)
async def latest_group(request: Request) -> Response:
    state = context_of(request).broker.state
    if state.latest_body is None:
        return Response(status_code=204)
    return Response(await latest_as_json(state.latest_body, state.latest_form), media_type=JSON)


EVENT_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9]{1,18}$"}
KEEP_ALIVE_SECONDS: Final = 15.0
GATHER_SECONDS: Final = 0.5
"""Events are gathered for this long and sent together, so that a watcher costs the same however many there are."""


@route(
    "GET /v1/events",
    "Server-sent events, resumable by Last-Event-ID",
    help="Events have ids: a client that sends the id of the last one it received gets those after it, or an event "
    "`missed` if they are no longer kept. An event `status` with the content of /v1/status follows each set of events.",
    parameters=(
        Parameter(name="Last-Event-ID", place="header", schema=EVENT_ID, help="Id of the last event received"),
        in_query("after", EVENT_ID, "The same, for clients that cannot set the header"),
    ),
    answers={200: Answer(help="An endless stream of server-sent events", content=TEXT_SCHEMA, media_type=EVENTS)},
    errors=("invalid-request",),
)
async def events(request: Request) -> Response:
    context = context_of(request)
    last = request.headers.get("last-event-id") or request.query_params.get("after")
    after = parse_int(last, "Last-Event-ID", least=0) if last else context.broker.state.events.last_id
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(context, after), media_type="text/event-stream", headers=headers)


async def _stream(context: AppContext, after: int) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    log = context.broker.state.events
    while True:
        # 0 asks for all events that are still known, so none can be missed.
        lot = _encode_missed(after) if after and log.has_forgotten(after) else b""
        lot += b"".join(map(_encode, log.after(after)))
        after = log.last_id
        yield lot + _encode_status(context, after)
        notified = await context.events_notifier.wait(KEEP_ALIVE_SECONDS)
        await context.stop_notifier.wait(GATHER_SECONDS if notified else 0.0)
        if context.stopping:
            return
        if not notified:
            yield b": keep-alive\n\n"


def _encode(event: Event) -> bytes:
    data = msgspec.json.encode({"time": event.time, **event.data})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.type.encode(), data)


def _encode_missed(after: int) -> bytes:
    return b'event: missed\ndata: {"after":%d}\n\n' % after


def _encode_status(context: AppContext, event_id: int) -> bytes:
    """Encode the whole status, sent after each lot of events so that a watcher needs no second source."""
    return b"id: %d\nevent: status\ndata: %s\n\n" % (event_id, context.status_text())
