"""The web application: a list of what it consists of."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from atropos_api.broker import Broker
from atropos_api.config import BrokerConfig
from atropos_api.errors import BrokerError
from atropos_api.http import ops, v1
from atropos_api.http.problems import answer_broker_error, answer_http_error, answer_unexpected
from atropos_api.http.services import Services


def create_app(config: BrokerConfig, broker: Broker) -> FastAPI:
    """The broker's HTTP side; needs a running event loop only once requests come."""
    app = FastAPI(title="Atropos broker", version="1", redoc_url=None)
    services = Services(broker=broker, config=config)
    broker.state.on_groups.append(services.groups_bell.ring)
    broker.state.on_pacing.append(services.pacing_bell.ring)
    # A run that ends or is taken over concerns those who wait for its batches.
    broker.state.on_pacing.append(services.groups_bell.ring)
    app.state.services = services
    app.add_exception_handler(BrokerError, answer_broker_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_unexpected)
    app.include_router(v1.router)
    app.include_router(ops.router)
    return app
