"""Sessions served over HTTP: their keys, their lifetime, access control, errors, and the HTTP server itself.

Errors have the form of OpenAI's. `ServedSessions` keeps the sessions with their ids and keys, the rollouts they belong
to, and when they end. `Listener` runs the HTTP server in the environment's own event loop. Access needs a key, and
requests of web pages are refused: a page opened in a browser on this machine can reach loopback addresses like any
local program. Such requests are recognised by the host name they ask for, their origin, and a content type that
browsers send without permission.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from atropos_api.common.cross_site import foreign_page_header, host_name, is_address
from atropos_api.common.identity import EVERYWHERE, host_in_url
from environments.sdk.config import KEY_PREFIX, SessionSettings
from environments.sdk.errors import (
    EnvironmentsError,
    InferenceRefused,
    InferenceUnavailable,
    RequestRefused,
    SamplingNotTrainable,
    ToolParserUnknown,
)
from environments.sdk.session.session import ManagedSession

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def problem_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the body with which an error is answered."""
    if isinstance(error, HTTPException):
        return error.status_code, _problem(error.status_code, str(error.detail))
    status = _status_of(error)
    message = str(error) if isinstance(error, EnvironmentsError) else f"{type(error).__name__} in the environment"
    return status, _problem(status, message, error.param if isinstance(error, RequestRefused) else None)


def problem_response(error: BaseException) -> Response:
    status, body = problem_of(error)
    return JSONResponse(body, status, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None)


async def answer_problem(_: Request, error: Exception) -> Response:
    return problem_response(error)


PROBLEM_HANDLERS: Mapping[Any, Callable[[Request, Exception], Any]] = {
    HTTPException: answer_problem,
    EnvironmentsError: answer_problem,
    Exception: answer_problem,  # the framework raises it again, so that it is logged
}


def _status_of(error: BaseException) -> int:
    if isinstance(error, InferenceUnavailable):
        return 503
    return (
        400 if isinstance(error, InferenceRefused | RequestRefused | SamplingNotTrainable | ToolParserUnknown) else 500
    )


def _problem(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": status, "param": param}}


def new_secret() -> str:
    """Return an id or a key that cannot be guessed: 192 random bits."""
    return secrets.token_urlsafe(24)


def refuse_foreign_host(headers: Headers, names: frozenset[str]) -> None:
    """Refuse a host name that is not this server's: an attacker may have pointed it at this machine."""
    host = headers.get("host", "")
    if not _is_own(host, names):
        raise HTTPException(
            403,
            f"the host {host[:80]!r} is not a name of this server; set --env.session_url to the URL that agents use",
        )


def refuse_foreign_page(headers: Headers) -> None:
    """Refuse requests that a page of another site has caused."""
    foreign = foreign_page_header(dict(headers.raw))
    if foreign is not None:
        name, value = (part.decode("latin-1") for part in foreign)
        raise HTTPException(403, f"pages of another site ({name}: {value[:80]}) may not use sessions")


def refuse_other_content(method: str, headers: Headers) -> None:
    """Refuse bodies not declared as JSON: browsers let a page send those anywhere without permission."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise HTTPException(415, f"the content type must be application/json, not {kind[:80] or 'missing'}")


def split_key(path: str, headers: Headers) -> tuple[str, str]:
    """Return the key of a request, from its header or from `/t/KEY/` before the path, and the path without it."""
    if path.startswith(KEY_PREFIX):
        key, _, rest = path.removeprefix(KEY_PREFIX).partition("/")
        return key, f"/{rest}"
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else ""), path


def require_key(given: str, *accepted: str) -> None:
    if not any(secrets.compare_digest(given.encode(), key.encode()) for key in accepted):
        raise HTTPException(401, "a session needs its key; send Authorization: Bearer KEY, the api_key of a client")


def _is_own(host: str, names: frozenset[str]) -> bool:
    """Return True for an address, a loopback name, one of `names`, or no host: browsers always send one."""
    name = host_name(host.encode("latin-1"))
    if name is None:
        return False
    return not name or name == "localhost" or name.endswith(".localhost") or name in names or is_address(name)


IDLE_SECONDS = 1800.0
"""Idle time after which a session that was opened over HTTP ends."""

MOST_OPENED_OVER_HTTP = 1024


@dataclass(slots=True)
class ServedSession:
    """A served session: its calls run in the context of the rollout that it belongs to."""

    session: ManagedSession
    key: str
    opened_over_http: bool
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    requests: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a call as if the rollout had made it."""
        task = asyncio.get_running_loop().create_task(call, context=self.context)
        self.requests.add(task)
        task.add_done_callback(self._ended)
        return task

    def idle_seconds(self) -> float:
        return 0.0 if self.requests else time.monotonic() - self.used_at

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.requests.discard(task)
        self.used_at = time.monotonic()


class ServedSessions:
    """The sessions of one proxy: they are kept by id, and those opened over HTTP end after an idle time."""

    def __init__(
        self, *, idle_seconds: float = IDLE_SECONDS, most_opened_over_http: int = MOST_OPENED_OVER_HTTP
    ) -> None:
        self._idle_seconds = idle_seconds
        self._most_opened_over_http = most_opened_over_http
        self._served: dict[str, ServedSession] = {}

    def __len__(self) -> int:
        self._end_idle()
        return len(self._served)

    def items(self) -> list[tuple[str, ServedSession]]:
        self._end_idle()
        return list(self._served.items())

    def add(self, session: ManagedSession, *, opened_over_http: bool = False) -> str:
        """Add a session to those served, and return its id."""
        opened = sum(served.opened_over_http for _, served in self.items())
        if opened_over_http and opened >= self._most_opened_over_http:
            raise HTTPException(429, f"{opened} sessions are open; DELETE those that have ended")
        name = new_secret()
        self._served[name] = ServedSession(session, new_secret(), opened_over_http)
        return name

    def find(self, name: str) -> ServedSession:
        self._end_idle()
        served = self._served.get(name)
        if served is None:
            raise HTTPException(404, "there is no such session, or it has ended")
        served.used_at = time.monotonic()
        return served

    def remove(self, name: str) -> None:
        """Stop serving a session; its requests in progress are cancelled."""
        served = self._served.pop(name, None)
        if served is not None:
            served.session.address = None
            for request in list(served.requests):
                request.cancel()

    def _end_idle(self) -> None:
        for name, served in list(self._served.items()):
            if served.opened_over_http and served.idle_seconds() > self._idle_seconds:
                self.remove(name)


def result_of(task: asyncio.Task[Any]) -> Any:
    """Return a task's result; a cancelled task means that its session was closed meanwhile."""
    if task.cancelled():
        raise InferenceUnavailable("the session was closed meanwhile")
    return task.result()


BACKLOG = 512
KEEP_ALIVE_SECONDS = 300
"""Time that an idle connection is kept. Tools of agents take longer than the usual 5 seconds, and a client that sends
just as its connection is closed gets an error.
"""


class SessionsNotServed(EnvironmentsError):
    """The address where sessions are to be served cannot be bound."""


class QuietServer(uvicorn.Server):
    """A quiet uvicorn server: it leaves signals to the environment, and sets `listening` once it listens."""

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
    """HTTP server for an application at the configured address: a free loopback port by default."""

    def __init__(self, app: Any, settings: SessionSettings) -> None:
        self._settings = settings
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            http="h11",  # uvicorn's other parser drops the body of a request that offers HTTP/2, as Java's clients do
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = QuietServer(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to listen, and return the root URL by which agents reach it."""
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
        return socket.gethostname() if host in EVERYWHERE else host_in_url(host)
