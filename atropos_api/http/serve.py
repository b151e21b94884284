"""From a configuration to a listening process."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from atropos_api.broker import Broker
from atropos_api.config import BrokerConfig
from atropos_api.errors import PortInUse
from atropos_api.http.app import create_app
from atropos_api.http.services import Services
from atropos_api.store.opening import open_store

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
RELOAD_CONFIG = "ATROPOS_BROKER_CONFIG"
BACKLOG = 2048
SHUTDOWN_SECONDS = 5


def serve(config: BrokerConfig) -> int:
    """Listen, open the store, and serve until a signal comes."""
    config = with_token(config)
    if config.reload:
        return serve_reloading(config)
    with bind(config.host, config.port) as listener:
        app, broker = make_app(config)
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d, store %s; %s", host, port, config.store, describe_contents(broker))
        try:
            BrokerServer(app).run(sockets=[listener])
        finally:
            broker.close()
    return 0


def serve_reloading(config: BrokerConfig) -> int:
    """For work on the broker itself: a fresh process at each change of the source, over the same store."""
    os.environ[RELOAD_CONFIG] = config.model_copy(update={"reload": False, "fresh": False}).model_dump_json()
    uvicorn.run(
        "atropos_api.http.serve:make_reloaded_app",
        factory=True,
        reload=True,
        reload_dirs=[str(Path(__file__).parents[1])],
        host=config.host,
        port=config.port,
        log_level="info",
        access_log=False,
        lifespan="off",
    )
    return 0


def make_reloaded_app() -> FastAPI:
    return make_app(BrokerConfig.model_validate_json(os.environ[RELOAD_CONFIG]))[0]


def make_app(config: BrokerConfig) -> tuple[FastAPI, Broker]:
    ledger, bodies = open_store(config.store, fsync=config.fsync, fresh=config.fresh)
    broker = Broker(ledger, bodies, settings=config.settings())
    return create_app(config, broker), broker


def with_token(config: BrokerConfig) -> BrokerConfig:
    """A broker that others can reach always asks for a token."""
    if config.token is not None or config.host in LOOPBACK_NAMES:
        return config
    token = secrets.token_urlsafe(24)
    logger.warning("%s can be reached from outside, so callers need a token: --token %s", config.host, token)
    return config.model_copy(update={"token": token})


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says who has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUse(_explain_bind(host, port, error)) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def describe_contents(broker: Broker) -> str:
    """What the store held at start, in one line."""
    state = broker.state
    run = state.runs.open
    what = f"run {run.name} ({run.run_id}) open after batch {run.committed_batch}" if run is not None else "no open run"
    oldest = state.queue.oldest()
    age = f", the oldest {state.clock() - oldest.arrived_at:.0f} s old" if oldest is not None else ""
    left_over = sum(len(groups) for groups in state.left_over.values())
    rest = f", {left_over} left over from other runs" if left_over else ""
    return f"{what}, {state.queue.groups} groups queued{age}{rest}"


class BrokerServer(uvicorn.Server):
    """uvicorn, with every long wait ended as soon as a signal asks the process to stop."""

    def __init__(self, app: FastAPI) -> None:
        self._services: Services = app.state.services
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's form
        # Unlike uvicorn's own, this does not raise the signal again after the shutdown: stopping is no failure.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._services.stop()


def _explain_bind(host: str, port: int, error: OSError) -> str:
    if error.errno not in {98, 48}:
        return f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
    return f"port {port} on {host} is taken{_name_owner(port)}; stop it or choose another with --port"


def _name_owner(port: int) -> str:
    """Who listens on a port, as far as this user may know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:120]
                return f" by pid {connection.pid} ({command})"
    except (psutil.Error, OSError):
        return ""
    return ""
