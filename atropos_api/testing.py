"""A real broker for other people's tests: in process over ASGI, or served on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from atropos_api.broker import Broker
from atropos_api.client import AsyncBrokerClient
from atropos_api.config import BrokerConfig
from atropos_api.http.app import create_app
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger

IN_PROCESS_URL = "http://127.0.0.1"


def make_memory_app(**options: Any) -> FastAPI:
    """The application over an empty memory store; `options` are those of `BrokerConfig`."""
    config = BrokerConfig(store="memory", **options)
    return create_app(config, Broker(MemoryLedger(), MemoryBodyLog(), settings=config.settings()))


def memory_broker(**options: Any) -> tuple[FastAPI, AsyncBrokerClient]:
    """The application and a client that calls it without a socket."""
    app = make_memory_app(**options)
    transport = httpx.ASGITransport(app=app)
    return app, AsyncBrokerClient(IN_PROCESS_URL, token=options.get("token"), transport=transport)


@contextmanager
def served_broker(**options: Any) -> Iterator[str]:
    """Serve a memory broker from a thread on a free port; yields its URL."""
    with serve_in_thread(make_memory_app(**options)) as url:
        yield url


@contextmanager
def serve_in_thread(app: FastAPI) -> Iterator[str]:
    """Serve an application on a free loopback port until the block ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.services.stopping = True
            server.should_exit = True
            server.force_exit = True
            thread.join(timeout=10)
