"""The HTTP server of an environment's sessions, in the environment's own event loop."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from environments.sdk.errors import EnvironmentsError
from environments.sdk.session.address import SessionSettings

WILDCARDS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
BACKLOG = 512
KEEP_ALIVE_SECONDS = 300
"""How long an idle connection is kept. Tools of agents take longer than the usual 5 seconds, and a client that sends
just as its connection is closed gets an error."""


class SessionsNotServed(EnvironmentsError):
    """The address where sessions are to be served cannot be bound."""


class QuietServer(uvicorn.Server):
    """Leaves signals to the environment, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()


class Listener:
    """Serves an application at the address that the settings name, a free loopback port by default."""

    def __init__(self, app: Any, settings: SessionSettings) -> None:
        self._settings = settings
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = QuietServer(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen from now on; the root of the addresses by which agents reach it."""
        listener = self._bind()
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]), context=contextvars.Context())
        await self._server.listening.wait()
        return self._settings.url.rstrip("/") or f"http://{self._name()}:{listener.getsockname()[1]}"

    async def aclose(self) -> None:
        if self._running is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._running
            self._running = None

    def _bind(self) -> socket.socket:
        host, port = self._settings.host, self._settings.port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise SessionsNotServed(
                f"sessions cannot be served at {host} port {port}: {error.strerror or error}; "
                "choose another with --env.session_host and --env.session_port (0: a free port)"
            ) from error
        return listener

    def _name(self) -> str:
        host = self._settings.host
        if host in WILDCARDS:
            return socket.gethostname()
        return f"[{host}]" if ":" in host else host
