"""Routes for operators and monitoring: health, status, the latest group, and server-sent events.

A watcher of `/v1/events` that reconnects with `Last-Event-ID` misses nothing. Nothing is kept for a watcher: each reads
the broker's ring of recent events at its own pace. One that reads too slowly is closed like every stalled connection,
and one that reconnects too late gets an event `missed`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool

from atropos_api.broker.status import Status
from atropos_api.http.content_negotiation import latest_as_json
from atropos_api.http.context import NO_STATUS, AppContext, StatusText, context_of
from atropos_api.http.request import JSON, json_response, parse_int, read_int
from atropos_api.routes.schema import (
    COUNT,
    EVENTS,
    FROM_ONE,
    TEXT_SCHEMA,
    Answer,
    Health,
    Operation,
    Parameter,
    RecentEvents,
    Schema,
    in_query,
    ok,
)
from atropos_api.store.backup import Backup
from atropos_api.store.base import KEPT_EVENTS, Event
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
    help="With `If-None-Match`, a watcher without a stream asks if anything has happened since it was given an `ETag`.",
    parameters=(
        Parameter(name="If-None-Match", place="header", schema=TEXT_SCHEMA, help="The `ETag` of the last answer"),
    ),
    answers={
        200: Answer(help="Run, policy, queue, environments, counters, and what the run waits for", content=Status),
        304: Answer(help="Nothing has happened since the answer with that `ETag`; only times have passed"),
    },
)
async def status(request: Request) -> Response:
    context = context_of(request)
    known = request.headers.get("if-none-match")
    found = context.fresh_status() if known is None else context.shared_status(newest=True)
    headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
    if known == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.text, media_type=JSON, headers=headers)


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


@route(
    "GET /v1/events/recent",
    "The newest events, oldest first",
    parameters=(
        in_query("after", COUNT, "Only events after the one with this id"),
        in_query("limit", FROM_ONE | {"maximum": KEPT_EVENTS, "default": 200}, "Largest number of events"),
    ),
    answers=ok(RecentEvents, "The events"),
    errors=("invalid-request",),
)
async def recent_events(request: Request) -> Response:
    log = context_of(request).broker.state.events
    limit = min(read_int(request, "limit", 200, least=1) or 1, KEPT_EVENTS)
    found = log.after(read_int(request, "after", 0, least=0) or 0)
    return json_response(RecentEvents(events=found[-limit:], last_id=log.last_id))


TAR: Final = "application/x-tar"


@route(
    "GET /v1/backup",
    "A backup of the store, while the broker works",
    help="A tar of the store's directory as it is at this moment. Unpack it into an empty directory and start a broker "
    "with that directory as --store. Other calls wait only while the ledger is copied, not while the tar is sent.",
    answers={
        200: Answer(help="The tar", content={"type": "string", "format": "binary"}, media_type=TAR),
    },
    errors=("no-backup", "store-unavailable"),
)
async def backup(request: Request) -> Response:
    made = context_of(request).broker.backup()
    headers = {"Content-Length": str(made.size_bytes), "Content-Disposition": "attachment; filename=store.tar"}
    return StreamingResponse(_send_backup(made), media_type=TAR, headers=headers)


async def _send_backup(backup: Backup) -> AsyncIterator[bytes]:
    try:
        async for piece in iterate_in_threadpool(backup.pieces()):
            yield piece
    finally:
        backup.close()


EVENT_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9]{1,18}$"}
KEEP_ALIVE_SECONDS: Final = 15.0
"""Interval at which the status is sent while nothing happens, because its durations change. A comment would also keep
the connection open, but no browser passes one on to the page's script.
"""

GATHER_SECONDS: Final = 0.5
"""Events are gathered for up to this long and sent together, so that a watcher costs the same however many there are.
All watchers wake at the same moments, so that one status is made for them all.
"""

DIAGNOSIS_SECONDS: Final = 2.0
"""Interval at which the diagnosis is checked while nothing happens: a stall is the absence of events."""


@route(
    "GET /v1/events",
    "Server-sent events, resumable by Last-Event-ID",
    help="Events have ids: a client that sends the id of the last one it received gets those after it, or an event "
    "`missed` if they are no longer kept. An event `status` with the content of /v1/status follows each set of events, "
    "and comes about every 15 seconds while nothing happens.",
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
    sent = NO_STATUS
    while True:
        # 0 asks for all events that are still known, so none can be missed.
        missed = after and log.has_forgotten(after)
        lot = _encode_missed(after, context.broker.state.clock()) if missed else b""
        lot += b"".join(map(_encode, log.after(after)))
        # A caller that has just changed something sees it in the first status, and no status is older than its events.
        after, sent = log.last_id, context.shared_status(newest=sent is NO_STATUS or bool(lot))
        yield lot + _encode_status(sent, after)
        quiet_since = time.monotonic()
        while not await _has_news(context, sent):
            if context.stopping:
                return
            if time.monotonic() - quiet_since >= KEEP_ALIVE_SECONDS:
                break


async def _has_news(context: AppContext, sent: StatusText) -> bool:
    """Wait for a notification, or for a moment; return True if there is something to send."""
    notifier = context.events_notifier
    seconds = min(KEEP_ALIVE_SECONDS, DIAGNOSIS_SECONDS)
    if sent.notifications != notifier.notifications or await notifier.wait(seconds):
        await context.stop_notifier.wait(GATHER_SECONDS - time.monotonic() % GATHER_SECONDS)
        return not context.stopping
    return context.shared_status().diagnosis != sent.diagnosis


def _encode(event: Event) -> bytes:
    data = msgspec.json.encode({"time": event.time, **event.data})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.type.encode(), data)


def _encode_missed(after: int, now: float) -> bytes:
    return b"event: missed\ndata: %s\n\n" % msgspec.json.encode({"time": now, "after": after})


def _encode_status(status: StatusText, event_id: int) -> bytes:
    """Encode the whole status, sent after each lot of events so that a watcher needs no second source."""
    return b"id: %d\nevent: status\ndata: %s\n\n" % (event_id, status.text)
