"""Start of the broker's process: from a configuration to a listening server.

`serve` binds the port, opens the store and runs `BrokerServer`: uvicorn with guarded connections, long waits that end
with the process, and no access log. On Redis it serves only while it holds the lease. `run-api --reload` starts a fresh
process at each change of the broker's own source, over the same store and socket.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final, Protocol, cast

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.supervisors import ChangeReload

from atropos_api.broker import Broker
from atropos_api.broker.batch_traces import BatchTraces
from atropos_api.common.errors import REFUSED, AtroposError
from atropos_api.common.identity import LOOPBACK_NAMES
from atropos_api.common.logs import LogContext, setup_logging
from atropos_api.common.malloc import Trimmer
from atropos_api.common.secrets import program_words
from atropos_api.common.tracing import Tracing, open_tracing
from atropos_api.config import BrokerConfig
from atropos_api.errors import PortInUse
from atropos_api.http.auth import AcceptedToken, reloaded_on_hangup
from atropos_api.http.connection_limits import Timeouts, sweep
from atropos_api.server.app import BrokerApp, create_app
from atropos_api.server.fast_path import FastPathProtocol, HasDirectCalls
from atropos_api.server.standby import Standby
from atropos_api.store.base import BodyLog, Ledger
from atropos_api.store.factory import open_held, open_session, open_store
from atropos_api.store.failpoints import CRASH_VARIABLE, Failpoint, Reach, ignore_failpoint, read_crash_step
from atropos_api.store.redis_session import RedisSession, is_redis

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 5
KEEP_ALIVE_SECONDS: Final = 75
SWEEP_TICKS: Final = 10
TRIM_TICKS: Final = 100
"""In ticks, of which uvicorn has ten a second."""

OTHER_DESCRIPTORS: Final = 128
"""Descriptors reserved for files that are not connections: segments, the ledger, logs."""

PROBE_AFTER_SECONDS: Final = 30
"""Silence after which the kernel probes a peer; one that vanished is noticed within a minute."""


class BrokerASGI(HasDirectCalls, Protocol):
    """An ASGI application that also has calls for connections to make directly."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class BrokerServer(uvicorn.Server):
    """The uvicorn server: it ends every long wait as soon as a signal asks the process to stop."""

    def __init__(self, app: BrokerASGI, config: BrokerConfig, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._trimmer = Trimmer()
        super().__init__(_uvicorn_config(app, config))

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            sweep(self.server_state.connections)
        if counter % TRIM_TICKS == 0:
            asyncio.get_running_loop().run_in_executor(None, self._trimmer.trim)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's form
        # Unlike uvicorn's, this does not raise the signal again after the shutdown: a stop is not a failure.
        had, self.should_exit = self.should_exit, True
        self.force_exit = had and sig == signal.SIGINT
        if not had:  # a second signal may come in the middle of a stop, which takes a lock
            self._stop()


def _uvicorn_config(app: BrokerASGI, config: BrokerConfig) -> uvicorn.Config:
    timeouts = Timeouts(
        max_connections=_affordable_connections(config.max_connections),
        header_seconds=config.header_timeout,
        stall_seconds=config.stall_timeout,
        idle_seconds=KEEP_ALIVE_SECONDS,
    )
    protocol = functools.partial(FastPathProtocol, timeouts=timeouts, source=app)
    return uvicorn.Config(
        app,
        http=cast("type[FastPathProtocol]", protocol),
        ws="none",
        log_config=None,
        # Warnings are about malformed requests, and anyone may send any number of those.
        log_level=max(logging.ERROR, logging.getLogger().level),
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def _affordable_connections(wanted: int) -> int:
    """Return `wanted`, or fewer if the limit on open files is too low and cannot be raised enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        logger.warning("the system allows %d open files, so at most %d connections", soft, soft - OTHER_DESCRIPTORS)
    return max(1, min(wanted, soft - OTHER_DESCRIPTORS))


def notice_vanished_peers(listener: socket.socket) -> None:
    """Let the kernel probe silent connections, and close those whose peers acknowledge nothing."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 60_000),
    ):
        # Linux has them all; elsewhere those that exist are set.
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


BACKLOG = 2048


def serve(config: BrokerConfig, logs: LogContext) -> int:
    """Listen, and serve until a signal stops the process."""
    with bind(config.host, config.port) as listener:
        config = with_token(config)
        if config.reload:
            return serve_reloading(config, listener)
        return serve_on(config, listener, logs)


def serve_on(config: BrokerConfig, listener: socket.socket, logs: LogContext) -> int:
    """Open the store and serve on a listening socket."""
    host, port = listener.getsockname()[:2]
    reach = read_crash_step(os.environ)
    if reach is not ignore_failpoint:
        logger.warning("%s is set, for tests: this broker exits or stops at that failpoint", CRASH_VARIABLE)
    token = AcceptedToken(config.token, file=config.token_file)
    tracing = open_tracing(config.otlp_traces_endpoint, service="atropos-broker")
    with closing(tracing), reloaded_on_hangup(token, file=config.token_file):
        if is_redis(config.store):
            session = open_session(config.store, lease_seconds=config.lease)
            logger.info("listening on http://%s:%d, store %s", host, port, session.place)
            return serve_redis(config, session, listener, token=token, reach=reach, logs=logs, tracing=tracing)
        store = open_store(config.store, fsync=config.fsync, fresh=config.fresh, reach=reach)
        app, broker = make_app(config, store, token=token, reach=reach)
        observe(broker, logs, tracing)
        logger.info("listening on http://%s:%d, store %s; %s", host, port, config.store, describe_contents(broker))
        try:
            BrokerServer(app, config, app.context.stop).run(sockets=[listener])
        finally:
            broker.close()
    return 0


def serve_redis(
    config: BrokerConfig,
    session: RedisSession,
    listener: socket.socket,
    *,
    token: AcceptedToken,
    reach: Reach,
    logs: LogContext,
    tracing: Tracing,
) -> int:
    """Serve while this process holds the lease of a Redis, stand by while it does not."""

    def activate(*, fresh: bool) -> tuple[BrokerApp, Broker]:
        app, broker = make_app(config, open_held(session, fresh=fresh), token=token, reach=reach)
        observe(broker, logs, tracing)
        logger.info("active on %s; %s", session.place, describe_contents(broker))
        return app, broker

    standby = Standby(session, activate)
    standby.start(fresh=config.fresh)
    try:
        BrokerServer(standby, config, standby.stop).run(sockets=[listener])
    finally:
        standby.close()
    return 0


def make_app(
    config: BrokerConfig, store: tuple[Ledger, BodyLog], *, token: AcceptedToken, reach: Reach
) -> tuple[BrokerApp, Broker]:
    ledger, bodies = store
    reach(Failpoint.STORE_OPENED)
    broker = Broker(ledger, bodies, settings=config, reach=reach)
    return create_app(config, broker, token), broker


def observe(broker: Broker, logs: LogContext, tracing: Tracing) -> None:
    """Add the broker's run to log records, and trace its groups if traces are on."""
    logs.describe(broker.log_fields)
    if tracing.is_on:
        traces = BatchTraces(tracing)
        broker.state.on_queued.append(traces.on_queued)
        broker.state.on_formed.append(traces.on_formed)


def with_token(config: BrokerConfig) -> BrokerConfig:
    """Return the configuration, with a generated token if others can reach the broker and none was given."""
    if config.token or config.token_file or config.host in LOOPBACK_NAMES:
        return config
    token = secrets.token_urlsafe(24)
    logger.warning("%s can be reached from outside, so callers need a token: --token %s", config.host, token)
    return config.model_copy(update={"token": token})


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; if the port is taken, raise an error that names the process that has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice_vanished_peers(listener)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # this fails too: two programs may bind a port on which none listens yet
    except OSError as error:
        listener.close()
        raise PortInUse(_explain_bind(host, port, error)) from error
    listener.setblocking(False)
    return listener


def describe_contents(broker: Broker) -> str:
    """Return one line on what the store held at start."""
    state = broker.state
    run = state.runs.open
    what = f"run {run.name} ({run.run_id}) open after batch {run.committed_batch}" if run is not None else "no open run"
    oldest = state.oldest_age_seconds()
    age = f", the oldest {oldest:.0f} s old" if oldest is not None else ""
    left_over = sum(len(groups) for groups in state.left_over.values())
    rest = f", {left_over} left over from other runs" if left_over else ""
    return f"{what}, {state.queue.groups} groups queued{age}{rest}"


def _explain_bind(host: str, port: int, error: OSError) -> str:
    if error.errno not in {98, 48}:
        return f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
    return f"port {port} on {host} is taken{_name_owner(port)}; stop it or choose another with --port"


def _name_owner(port: int) -> str:
    """Describe the process that listens on a port, as far as this user may see it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = program_words(psutil.Process(connection.pid).cmdline())[:120]
                return f" by pid {connection.pid} ({command})"
    except (psutil.Error, OSError):
        return ""
    return ""


def serve_reloading(config: BrokerConfig, listener: socket.socket) -> int:
    """Start a child process that serves, and restart it whenever a source file changes, until a signal comes."""
    if config.store == "memory":
        logger.warning("--store memory is emptied at each reload; name a directory to keep groups and runs")
    elif config.fresh:
        for part in reversed(open_store(config.store, fsync=config.fsync, fresh=True)):
            part.close()
    setup = uvicorn.Config(
        "unused", reload=True, reload_dirs=[str(Path(__file__).parents[1])], log_config=None, log_level="info"
    )
    child = functools.partial(serve_child, config.model_copy(update={"reload": False, "fresh": False}))
    ChangeReload(setup, target=child, sockets=[listener]).run()
    return 0


def serve_child(config: BrokerConfig, *, sockets: list[socket.socket]) -> None:
    # uvicorn spawns this process, so it imports the changed source.

    logs = setup_logging("run-api", level=config.log_level, form=config.log_format)
    try:
        serve_on(config, sockets[0], logs)
    except AtroposError as error:
        logger.error("%s", error)  # noqa: TRY400 - the line says all there is to say
        sys.exit(REFUSED)
