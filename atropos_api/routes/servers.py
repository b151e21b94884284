"""The routes of the registry of inference servers: registration, the sets that others follow, drain and removal.

A server registers and renews by one route, whose answer waits until the server's state changes, so that it learns at
once that it may serve or has to drain. Followers wait on the epoch and get the whole set each time. A change is
answered after a moment, in which further ones are gathered: otherwise, if many servers start together, followers would
get a set for each of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from atropos_api.errors import InvalidRequest
from atropos_api.http.context import context_of
from atropos_api.http.request import JSON, decode_body, json_response, read_body, read_int, read_wait, wants_gzip
from atropos_api.http.streaming import LongPoll
from atropos_api.routes.schema import INTEGER, NOTHING, TEXT_SCHEMA, WAIT, Operation, in_path, in_query, ok
from atropos_api.wire.servers import SERVER_ID, InferenceServer, ServerLease, ServerReport, ServerSet

router = APIRouter(tags=["v1"])

route = functools.partial(Operation, router)

VARIES: Final[Mapping[str, str]] = {"Vary": "Accept-Encoding"}

SERVER_ID_PARAMETER: Final = in_path(
    "server_id", {"type": "string", "pattern": f"^{SERVER_ID}$"}, "Name of the server, kept over its restarts"
)

_encode = msgspec.json.Encoder().encode


@route(
    "PUT /v1/servers/{server_id}",
    "Register an inference server, or renew its lease",
    help="With `wait`, the answer comes once the server's state is not the `state` of the call; the lease is renewed "
    "when the call arrives. A server that cannot renew must answer no request for tokens after its lease has ended.",
    parameters=(
        SERVER_ID_PARAMETER,
        in_query("state", TEXT_SCHEMA, "The state that the caller knows"),
        WAIT,
    ),
    body=ServerReport,
    example={"lease_id": "5b1c0e9a77d24c11", "boot_id": "9f3a", "mode": "adapters", "port": 9001, "version": 7},
    answers=ok(ServerLease, "The server's state, and its lease"),
    errors=("invalid-request", "lease-ended", "server-id-in-use"),
)
async def renew(request: Request, server_id: str) -> Response:
    context = context_of(request)
    if re.fullmatch(SERVER_ID, server_id) is None:
        raise InvalidRequest(
            f"server_id: letters, digits and . _ : ~ - are needed, 200 at most, got {server_id[:80]!r}",
            field="server_id",
            value=server_id[:80],
        )
    wait = LongPoll(request, read_wait(request))
    known = request.query_params.get("state")
    report = decode_body(await read_body(request), ServerReport)
    servers = context.broker.state.servers
    peer = request.client.host if request.client is not None else None
    lease = servers.renew(server_id, report, peer)
    context.watch_leases()
    while lease.state == known and await wait.on(context.servers_notifier):
        lease.state = servers.state_of(server_id, report.lease_id)
    return json_response(lease)


@route(
    "GET /v1/servers",
    "The registered inference servers",
    help="Always the whole set. With `since` and `wait`, the answer comes once the set's epoch is another. Servers "
    "that are gone stay in it for ten minutes, with the reason.",
    parameters=(
        in_query("policy", TEXT_SCHEMA, "Only the servers of this policy"),
        in_query(
            "answering",
            {"type": "boolean", "default": False},
            "Only servers that answer requests: serving ones, and draining ones, which end theirs",
        ),
        in_query("since", INTEGER, "The epoch of the set that the caller has"),
        WAIT,
    ),
    answers=ok(ServerSet, "The servers"),
    errors=("invalid-request",),
)
async def list_servers(request: Request) -> Response:
    context = context_of(request)
    policy = request.query_params.get("policy")
    answering = _read_flag(request, "answering")
    since = read_int(request, "since")
    wait = LongPoll(request, read_wait(request))
    servers = context.broker.state.servers
    context.watch_leases()
    while since is not None and (context.gathers_changes or since == servers.epoch(policy, answering=answering)):
        if not await wait.on(context.followers_notifier):
            break
    shared = context.servers_set(policy, answering=answering)
    if wants_gzip(request.headers.get("accept-encoding", "")):
        return Response(shared.gzip, media_type=JSON, headers={"Content-Encoding": "gzip", **VARIES})
    return Response(shared.text, media_type=JSON, headers=VARIES)


@route(
    "POST /v1/servers/{server_id}/drain",
    "Let a server end the requests that it runs, take no new one, and leave",
    help="Repeating the call is harmless.",
    parameters=(SERVER_ID_PARAMETER,),
    answers=ok(InferenceServer, "The server"),
    errors=("unknown-server",),
)
async def drain(request: Request, server_id: str) -> Response:
    return json_response(context_of(request).broker.state.servers.drain(server_id))


@route(
    "DELETE /v1/servers/{server_id}",
    "Remove a server that has ended",
    help="Its lease ends at once. A server that still runs registers again, and joins; drain it to end it. Repeating "
    "the call is harmless.",
    parameters=(SERVER_ID_PARAMETER, in_query("lease_id", TEXT_SCHEMA, "Only if the server has this lease")),
    answers=NOTHING,
    errors=("unknown-server",),
)
async def remove(request: Request, server_id: str) -> Response:
    context_of(request).broker.state.servers.remove(server_id, request.query_params.get("lease_id"))
    return Response(status_code=204)


def _read_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in {"true", "false"}:
        raise InvalidRequest(f"{name}: true or false is needed, got {text[:80]!r}", field=name, value=text[:80])
    return text == "true"
