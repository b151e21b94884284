"""From a configuration to a listening process."""

from __future__ import annotations

import logging
import os
import secrets
import socket

from atropos_api.broker import Broker
from atropos_api.common.redaction import program_words
from atropos_api.config import BrokerConfig
from atropos_api.errors import PortInUse
from atropos_api.http.accepted_token import AcceptedToken, reloaded_on_hangup
from atropos_api.http.app import BrokerApp, create_app
from atropos_api.http.server import BrokerServer, notice_vanished_peers
from atropos_api.http.standby import Standby
from atropos_api.store.base import BodyLog, Ledger
from atropos_api.store.opening import open_held, open_session, open_store
from atropos_api.store.redis_session import RedisSession, is_redis
from atropos_api.store.steps import CRASH_VARIABLE, Reach, Step, pass_by, read_crash_step

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
BACKLOG = 2048


def serve(config: BrokerConfig) -> int:
    """Listen, and serve until a signal comes."""
    with bind(config.host, config.port) as listener:
        config = with_token(config)
        if config.reload:
            from atropos_api.http.reloading import serve_reloading

            return serve_reloading(config, listener)
        return serve_on(config, listener)


def serve_on(config: BrokerConfig, listener: socket.socket) -> int:
    """Open the store and serve on a listening socket."""
    host, port = listener.getsockname()[:2]
    reach = read_crash_step(os.environ)
    if reach is not pass_by:
        logger.warning("%s is set, for tests: this broker ends or stops itself there", CRASH_VARIABLE)
    token = AcceptedToken(config.token, file=config.token_file)
    with reloaded_on_hangup(token, file=config.token_file):
        if is_redis(config.store):
            session = open_session(config.store, lease_seconds=config.lease)
            logger.info("listening on http://%s:%d, store %s", host, port, session.place)
            return serve_redis(config, session, listener, token=token, reach=reach)
        store = open_store(config.store, fsync=config.fsync, fresh=config.fresh, reach=reach)
        app, broker = make_app(config, store, token=token, reach=reach)
        logger.info("listening on http://%s:%d, store %s; %s", host, port, config.store, describe_contents(broker))
        try:
            BrokerServer(app, config, app.state.services.stop).run(sockets=[listener])
        finally:
            broker.close()
    return 0


def serve_redis(
    config: BrokerConfig, session: RedisSession, listener: socket.socket, *, token: AcceptedToken, reach: Reach
) -> int:
    """Serve while this process holds the lease of a Redis, stand by while it does not."""

    def activate(*, fresh: bool) -> tuple[BrokerApp, Broker]:
        app, broker = make_app(config, open_held(session, fresh=fresh), token=token, reach=reach)
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
    reach(Step.STORE_OPENED)
    broker = Broker(ledger, bodies, settings=config.settings(), reach=reach)
    return create_app(config, broker, token), broker


def with_token(config: BrokerConfig) -> BrokerConfig:
    """A broker that others can reach always asks for a token."""
    if config.token or config.token_file or config.host in LOOPBACK_NAMES:
        return config
    token = secrets.token_urlsafe(24)
    logger.warning("%s can be reached from outside, so callers need a token: --token %s", config.host, token)
    return config.model_copy(update={"token": token})


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says who has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice_vanished_peers(listener)
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
                command = program_words(psutil.Process(connection.pid).cmdline())[:120]
                return f" by pid {connection.pid} ({command})"
    except (psutil.Error, OSError):
        return ""
    return ""
