"""The routes of those who watch: health, status, events, metrics, and this description itself."""

from __future__ import annotations

from typing import Final

from atropos_api.http.contract.answers import Health, Status
from atropos_api.http.contract.pieces import (
    EVENTS,
    HTML,
    OBJECT,
    TEXT,
    TEXT_SCHEMA,
    Answer,
    Operation,
    Parameter,
    Schema,
    in_query,
    ok,
)
from atropos_api.wire.groups import Group

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
