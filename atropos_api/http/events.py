"""`/v1/events`: what happens, as server-sent events; a watcher that reconnects with `Last-Event-ID` misses nothing.

Nothing is kept for a watcher: each reads the broker's ring of late events at its own pace. One that reads too slowly is
closed like every connection that stands still, and one that comes back too late is told so by an event `missed`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from atropos_api.broker.status import describe_status
from atropos_api.http.parameters import parse_int
from atropos_api.http.services import Services, services_of
from atropos_api.store.base import Event

router = APIRouter(tags=["operations"])

KEEP_ALIVE_SECONDS: Final = 15.0
GATHER_SECONDS: Final = 0.5
"""Events are sent in lots, so that a watcher costs the same however much happens."""


@router.get("/v1/events", summary="Server-sent events, resumable by Last-Event-ID")
async def events(request: Request) -> Response:
    services = services_of(request)
    last = request.headers.get("last-event-id") or request.query_params.get("after")
    after = parse_int(last, "Last-Event-ID", least=0) if last else services.broker.state.events.last_id
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(services, after), media_type="text/event-stream", headers=headers)


async def _stream(services: Services, after: int) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    log = services.broker.state.events
    while True:
        # 0 asks for all that is known, of whatever there was.
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


def _encode_status(services: Services, event_id: int) -> bytes:
    """The whole status after each lot, so that a watcher needs no second source."""
    return b"id: %d\nevent: status\ndata: %s\n\n" % (event_id, services.status_text(_describe))


def _describe(services: Services) -> bytes:
    return msgspec.json.encode(describe_status(services.broker))
