"""Who comes in: the token, by header or by path prefix, and nobody on behalf of a foreign web page."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.config import BrokerConfig
from atropos_api.http.problems import problem_response

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})
CHANGING_GETS: Final = re.compile(r"/(reset_data|batch|v1/batches/.*)/?")
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PREFIX: Final = "/t/"


def changes_something(scope: Scope) -> bool:
    """Whether the request may change state; two GETs of the Atropos contract do, and asking for a batch forms it."""
    return scope["method"] not in SAFE_METHODS or CHANGING_GETS.fullmatch(scope["path"]) is not None


class Door:
    """ASGI middleware. Legacy clients cannot send a token but can be given `http://host:port/t/<token>` as base URL."""

    def __init__(self, app: ASGIApp, config: BrokerConfig) -> None:
        self._app = app
        self._token = config.token.encode() if config.token else None
        names = {"localhost", config.host.lower(), socket.gethostname().lower(), *map(str.lower, config.allowed_hosts)}
        self._host_names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope, refusal = self._check_token(scope, headers)
        refusal = refusal or self._check_site(scope, headers)
        await (refusal or self._app)(scope, receive, send)

    def _check_token(self, scope: Scope, headers: Headers) -> tuple[Scope, Response | None]:
        path: str = scope["path"]
        shown = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if path.startswith(PREFIX):
            shown, _, rest = path.removeprefix(PREFIX).partition("/")
            path = f"/{rest}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if self._token is None or path in OPEN_PATHS:
            return scope, None
        if hmac.compare_digest(shown.encode(), self._token):
            return scope, None
        detail = "this broker asks for a token: send Authorization: Bearer <token>, or use /t/<token>/ before the path"
        return scope, problem_response(401, "token-required", detail)

    def _check_site(self, scope: Scope, headers: Headers) -> Response | None:
        """A page that the user visits is a loopback peer too; its requests show their origin, or a foreign name."""
        host = headers.get("host", "")
        # Whoever knows the token is no stray page; without one, only a name of ours proves that DNS was not rebound.
        if self._token is None and not self._is_own_name(host):
            detail = f"the host name {host!r} is not one of this broker's; allow it with --allowed-hosts"
            return problem_response(403, "cross-site-request", detail, field="Host", value=host)
        if not changes_something(scope):
            return None
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            detail = f"requests of pages from {origin!r} may change nothing here"
            return problem_response(403, "cross-site-request", detail, field="Origin", value=origin)
        if headers.get("sec-fetch-site") == "cross-site":
            detail = "requests of pages from other sites may change nothing here"
            return problem_response(403, "cross-site-request", detail, field="Sec-Fetch-Site", value="cross-site")
        return None

    def _is_own_name(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if not name or name in self._host_names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
