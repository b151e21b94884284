"""uvicorn as the broker runs it: guarded connections, long waits that end with the process, no tracks in the log."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from atropos_api.common.allocation import Trimmer
from atropos_api.config import BrokerConfig
from atropos_api.http.connections import Patience, sweep
from atropos_api.http.hot import PromptCalls
from atropos_api.http.prompt import PromptProtocol

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 5
KEEP_ALIVE_SECONDS: Final = 75
SWEEP_TICKS: Final = 5
TRIM_TICKS: Final = 100
"""uvicorn ticks ten times a second."""

OTHER_DESCRIPTORS: Final = 128
"""Files that are no connections: segments, the ledger, logs."""

PROBE_AFTER_SECONDS: Final = 30
"""A peer that fell silent is asked by the kernel whether it is still there; a vanished one is noticed in a minute."""


class BrokerASGI(Protocol):
    """An application with calls that connections may ask directly."""

    def prompt_calls(self) -> PromptCalls: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class BrokerServer(uvicorn.Server):
    """uvicorn, with every long wait ended as soon as a signal asks the process to stop."""

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
        # Unlike uvicorn's own, this does not raise the signal again after the shutdown: stopping is no failure.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._stop()


def _uvicorn_config(app: BrokerASGI, config: BrokerConfig) -> uvicorn.Config:
    patience = Patience(
        max_connections=_affordable_connections(config.max_connections),
        header_seconds=config.header_timeout,
        stall_seconds=config.stall_timeout,
        idle_seconds=KEEP_ALIVE_SECONDS,
    )
    protocol = functools.partial(PromptProtocol, patience=patience, find_calls=app.prompt_calls)
    return uvicorn.Config(
        app,
        http=cast("type[PromptProtocol]", protocol),
        ws="none",
        log_config=None,
        # Warnings are about malformed requests, of which anyone may send any number.
        log_level=max(logging.ERROR, logging.getLogger().level),
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def _affordable_connections(wanted: int) -> int:
    """As many as asked for, if the system allows this process so many open files; it is asked for more if not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        logger.warning("the system allows %d open files, so %d connections are taken", soft, soft - OTHER_DESCRIPTORS)
    return max(1, min(wanted, soft - OTHER_DESCRIPTORS))


def notice_vanished_peers(listener: socket.socket) -> None:
    """Have the kernel probe silent connections, and give up on peers that acknowledge nothing."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 60_000),
    ):
        # Linux names them all; elsewhere what exists is set.
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
