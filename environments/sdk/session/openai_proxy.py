"""Managed sessions over HTTP, for agents that use OpenAI's API: separate programs, in any language.

    async with self.server.managed_server(use_proxy=True) as session:
        await run_agent(base_url=session.get_url(), api_key=session.api_key)
        return scored_group(session.nodes, scores), []

Requests run as if the rollout had made them itself. Each session has an address and a key that cannot be guessed. With
the proxy's own key (`ATROPOS_SESSION_KEY`) clients can also list, open and close sessions, by the routes of the
original Atropos' session proxy; sessions opened this way end after an idle period.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from environments.sdk.config import KEY_VARIABLE, APIServerConfig, SessionAddress, SessionSettings
from environments.sdk.errors import RequestRefused
from environments.sdk.inference.server import HttpServer
from environments.sdk.session.openai_routes import SessionRoutes, read_object
from environments.sdk.session.served import (
    PROBLEM_HANDLERS,
    Listener,
    ServedSession,
    ServedSessions,
    new_secret,
    problem_response,
    refuse_foreign_host,
    refuse_foreign_page,
    refuse_other_content,
    require_key,
    split_key,
)
from environments.sdk.session.session import ManagedSession

CREATE_FIELDS = frozenset({"tool_parser", "base_url", "track_tree"})


class SessionSource(Protocol):
    """Interface of the object that opens sessions: a `ServerManager`."""

    @property
    def config(self) -> APIServerConfig: ...

    @property
    def servers(self) -> Sequence[HttpServer]: ...

    def open_session(self, tokenizer: Any = None, **options: Any) -> ManagedSession: ...


class SessionProxy:
    """An ASGI application over the sessions of one manager: `start` serves it.

    `tokenizer` and `model_name` replace the manager's own. With `asks_for_keys` off the program that serves it must
    control access itself.
    """

    def __init__(
        self,
        source: SessionSource,
        settings: SessionSettings | None = None,
        *,
        tokenizer: Any = None,
        model_name: str | None = None,
        asks_for_keys: bool = True,
        sessions: ServedSessions | None = None,
    ) -> None:
        self._source = source
        self._settings = settings or SessionSettings()
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._asks_for_keys = asks_for_keys
        self._sessions = ServedSessions() if sessions is None else sessions
        self._key = os.environ.get(KEY_VARIABLE) or new_secret()
        self._listener = Listener(self, self._settings)
        self._root_url = self._settings.url.rstrip("/")
        names = (self._settings.host, socket.gethostname(), urlsplit(self._settings.url).hostname or "")
        self._names = frozenset(name.lower() for name in names)
        self._app = Starlette(routes=self._routes(), exception_handlers=PROBLEM_HANDLERS)

    async def start(self) -> None:
        self._root_url = await self._listener.start()

    async def aclose(self) -> None:
        await self._listener.aclose()

    @contextmanager
    def serve(self, session: ManagedSession) -> Iterator[None]:
        """Answer requests for this session inside the block; those in progress at its end are cancelled."""
        name = self._add(session)
        try:
            yield
        finally:
            self._sessions.remove(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        try:
            if self._asks_for_keys:
                refuse_foreign_host(headers, self._names)
            refuse_foreign_page(headers)
            refuse_other_content(scope["method"], headers)
        except HTTPException as error:
            await problem_response(error)(scope, receive, send)
            return
        key, path = split_key(scope["path"], headers)
        try:
            await self._app({**scope, "path": path, "raw_path": path.encode(), "session_key": key}, receive, send)
        except ClientDisconnect:
            return  # the client has disconnected, so the response is not sent

    def _routes(self) -> list[Route]:
        of_session = SessionRoutes(self._find, model_name=self._model_of, temperature=self._settings.temperature)
        return [
            Route("/health", self._health),
            Route("/servers", self._list_servers),
            Route("/setup", self._set_up, methods=["POST"]),
            Route("/sessions", self._list_sessions),
            Route("/sessions/create", self._create, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/{name}/v1/models", self._list_models),
            Route("/{name}/v1/chat/completions", of_session.chat, methods=["POST"]),
            Route("/{name}/v1/chat/completions/render", of_session.render, methods=["POST"]),
            Route("/{name}/v1/completions", of_session.text, methods=["POST"]),
            Route("/{name}/nodes", of_session.nodes),
            Route("/{name}", self._delete, methods=["DELETE"]),
        ]

    async def _health(self, _: Request) -> Response:
        up = sum(server.channel.up for server in self._source.servers)
        counts = {"sessions": len(self._sessions), "servers": len(self._source.servers), "healthy_servers": up}
        return JSONResponse({"status": "ok", "model": self._model_of(), **counts})

    async def _list_servers(self, request: Request) -> Response:
        self._require_owner(request)
        listed = [
            {
                "index": index,
                "base_url": server.config.base_url,
                "healthy": server.channel.up,
                "model_name": server.model_name,
                "server_type": server.config.server_type,
            }
            for index, server in enumerate(self._source.servers)
        ]
        return JSONResponse({"servers": listed})

    async def _set_up(self, request: Request) -> Response:
        """Refuse the request: with this route the original Atropos' managers set the servers of their proxy."""
        self._require_owner(request)
        raise HTTPException(409, "the environment sets the servers; name them with --openai.base_url")

    async def _list_models(self, request: Request) -> Response:
        if "name" in request.path_params:
            self._find(request)
        else:
            self._require_owner(request)
        model = {"id": self._model_of(), "object": "model", "created": 0, "owned_by": "environment"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _list_sessions(self, request: Request) -> Response:
        self._require_owner(request)
        return JSONResponse({"sessions": [self._described(name, served) for name, served in self._sessions.items()]})

    async def _create(self, request: Request) -> Response:
        self._require_owner(request)
        body = await read_object(request)
        refused = sorted(set(body) - CREATE_FIELDS) + ["track_tree"] * bool(body.get("track_tree"))
        if refused:
            raise RequestRefused(f"{refused[0]}: a session takes only tool_parser and base_url", param=refused[0])
        wanted = {key: body[key] for key in ("tool_parser", "base_url") if body.get(key)}
        try:
            session = self._source.open_session(self._tokenizer, **wanted)
        except RequestRefused as error:  # no server has the address that was named
            raise HTTPException(404, str(error)) from error
        name = self._add(session, opened_over_http=True)
        served = self._sessions.find(name)
        reached = {"url": served.session.get_url(), "api_key": served.key}
        return JSONResponse({**self._described(name, served), **reached})

    async def _delete(self, request: Request) -> Response:
        """End a session; one that a rollout serves ends with the rollout, and its agent may not end it."""
        served, name = self._find(request), request.path_params["name"]
        if not served.opened_over_http:
            self._require_owner(request)
        self._sessions.remove(name)
        return JSONResponse({"status": "deleted", "uuid": name})

    def _add(self, session: ManagedSession, *, opened_over_http: bool = False) -> str:
        name = self._sessions.add(session, opened_over_http=opened_over_http)
        key = self._sessions.find(name).key
        session.address = SessionAddress(self._root_url, name, key, self._settings.key_in_url)
        return name

    def _find(self, request: Request) -> ServedSession:
        """Return the session that a request names; the request must send its key or the proxy's."""
        served = self._sessions.find(request.path_params["name"])
        if self._asks_for_keys:
            require_key(request.scope["session_key"], served.key, self._key)
        return served

    def _require_owner(self, request: Request) -> None:
        if self._asks_for_keys:
            require_key(request.scope["session_key"], self._key)

    def _model_of(self, session: ManagedSession | None = None) -> str:
        return self._model_name or (self._source.config.model_name if session is None else session.model_name)

    def _described(self, name: str, served: ServedSession) -> dict[str, Any]:
        session = served.session
        return {
            "uuid": name,
            "model_name": self._model_of(session),
            "base_url": session.base_url,
            "tool_parser": session.tool_parser_name,
            "num_nodes": len(session.nodes),
            "created_at": served.created_at,
        }
