"""The web application: `create_app` puts its middleware, error handlers and routes together."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from atropos_api.broker import Broker
from atropos_api.broker.v0 import AtroposContract
from atropos_api.config import BrokerConfig
from atropos_api.errors import BrokerError
from atropos_api.http.auth import AcceptedToken, AuthMiddleware, RequestGuard
from atropos_api.http.context import AppContext
from atropos_api.http.problems import (
    answer_broker_error,
    answer_client_gone,
    answer_http_error,
    answer_unexpected,
    as_coroutine,
)
from atropos_api.http.streaming import TRANSPORT_KEY, ReadOut, find_transport
from atropos_api.routes import docs, fleets, metrics, ops, page, servers, v0, v1, watch
from atropos_api.routes.docs import make_document
from atropos_api.routes.schema import operations_of
from atropos_api.server.fast_path import DirectCalls, HotRoutes, make_direct_calls
from atropos_api.server.group_commit import AnswerSteps, SyncBeforeAnswer
from atropos_api.store.factory import needs_sync
from atropos_api.store.failpoints import ignore_failpoint

ANSWERS: Final = {
    BrokerError: answer_broker_error,
    ClientDisconnect: answer_client_gone,
    HTTPException: answer_http_error,
    Exception: answer_unexpected,
}


class BrokerApp(FastAPI):
    """FastAPI, with the state of one broker; it notes the connection's transport before middleware hides it."""

    context: AppContext
    """The state that the handlers share."""

    direct_calls: DirectCalls
    """Handlers that the connections' fast path calls without ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[TRANSPORT_KEY] = find_transport(send)
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = make_document(operations_of(self.routes))
        return self.openapi_schema


def create_app(
    config: BrokerConfig, broker: Broker, token: AcceptedToken | None = None, *, only: re.Pattern[str] | None = None
) -> BrokerApp:
    """Create the broker's HTTP application; `app.context` holds what its handlers share.

    `token` is the token that callers must show, if it can change; else it is that of the configuration. `only` limits
    the calls to GETs of the paths that it matches.
    """
    app = BrokerApp(title="Atropos broker", version="1", redirect_slashes=False, openapi_url=None)
    app.context = make_context(config, broker)
    guard = RequestGuard(config, token or AcceptedToken(config.token, file=config.token_file), only)
    syncs = needs_sync(config.store, config.fsync)
    app.direct_calls = make_direct_calls(app.context, guard, syncs=syncs)
    app.add_middleware(HotRoutes)
    if syncs:
        app.add_middleware(SyncBeforeAnswer, sync=broker.sync)
    # Middleware added later is further out: only answers to CORS preflight requests need not pass the request guard.
    app.add_middleware(AuthMiddleware, guard=guard)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(ReadOut, most_bytes=config.max_body_bytes)
    for kind, answer in ANSWERS.items():
        app.add_exception_handler(kind, as_coroutine(answer))
    # Routes are tried in order, so those called most come first.
    for router in (
        *(v1.router, servers.router, fleets.router, v0.router, watch.router, page.router),
        *(ops.router, metrics.router, docs.router),
    ):
        app.include_router(router)
    if broker.state.reach is not ignore_failpoint:
        app.add_middleware(AnswerSteps, reach=broker.state.reach)
    return app


def make_context(config: BrokerConfig, broker: Broker) -> AppContext:
    context = AppContext(broker=broker, config=config, legacy=AtroposContract(broker))
    broker.state.on_groups.append(context.groups_notifier.notify)
    broker.state.on_pacing.append(context.pacing_notifier.notify)
    # Requests that wait for a run's batches must notice that it ended or was taken over.
    broker.state.on_pacing.append(context.groups_notifier.notify)
    broker.state.servers.on_change.append(lambda _: context.note_server_change())
    broker.state.fleets.on_change.append(lambda _: context.fleets_notifier.notify())
    broker.state.events.on_event.append(context.events_notifier.notify)
    broker.state.on_groups.append(context.events_notifier.notify)
    return context
