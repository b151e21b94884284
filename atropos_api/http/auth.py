"""Authentication: the token, by header or by path prefix, and refusal of requests that a foreign web page caused.

A web page that is open in a browser on the broker's machine sends its requests from loopback, as local programs do. It
is recognised by headers that browsers add and a page cannot change: `Host`, `Origin`, `Sec-Fetch-Site` and the like.
`RequestGuard` holds the rules and `AuthMiddleware` applies them. `AcceptedToken` is the token that callers must send:
given once, or in a file that SIGHUP reloads.
"""

from __future__ import annotations

import hmac
import logging
import re
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.common.cross_site import PAGE_HEADERS, SAFE_METHODS, foreign_page_header, host_name, is_address
from atropos_api.common.errors import AtroposError
from atropos_api.common.head_requests import HeadAsGet
from atropos_api.common.secrets import TokenUnreadable, read_token_file
from atropos_api.config import BrokerConfig, check_token
from atropos_api.http.problems import problem_response

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})
CHANGING_GETS: Final = re.compile(r"/(reset_data|batch|v1/batches/.*)/?")
TOUCHING_GETS: Final = frozenset({"/status-env", "/v1/backup"})
"""GETs that record that an environment is alive, or that cost much; they are refused to the pages of other sites."""
NO_HEADS: Final = re.compile(rf"{CHANGING_GETS.pattern}|/v1/backup")
"""GETs that are not made for a HEAD: they change something, or write a backup that nobody would read."""

PREFIX: Final = "/t/"
ORIGINAL_PATH: Final = "atropos.path"
"""Key under which the scope has the path as it was asked for, if that was changed."""

BEARER: Final = b"bearer "
PREFETCH_HEADERS: Final = (b"sec-purpose", b"purpose")
BROWSER_HEADERS: Final = PAGE_HEADERS.union(PREFETCH_HEADERS)
WANTED_HEADERS: Final = BROWSER_HEADERS | {b"authorization", b"host"}
MOST_HOSTS: Final = 64

Shown = Mapping[bytes, bytes]
"""The headers of a request that the guard reads."""


def changes_something(method: str, path: str) -> bool:
    """Return True if the request may change state; so may two GETs of the Atropos contract and GETs of v1 batches."""
    return method not in SAFE_METHODS or CHANGING_GETS.fullmatch(path) is not None


class RequestGuard:
    """The request guard: it checks token, host name and origin.

    Legacy clients cannot send a token but can be given `http://host:port/t/<token>` as base URL.
    """

    def __init__(self, config: BrokerConfig, token: AcceptedToken, only: re.Pattern[str] | None = None) -> None:
        """`only` limits the calls to GETs of the paths that it matches whole."""
        self._token = token
        self._only = only
        self._allowed_origins = frozenset(origin.lower() for origin in config.allowed_origins)
        names = {"localhost", config.host.lower(), socket.gethostname().lower(), *map(str.lower, config.allowed_hosts)}
        self._host_names = names
        self._own_hosts: set[bytes] = set()

    def refuse(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], token: bytes | None = None
    ) -> Response | None:
        """Return the answer that refuses the call, or None if it may be made. `path` comes without `/t/<token>`."""
        if self._only is not None and not (method in {"GET", "HEAD"} and self._only.fullmatch(path)):
            return problem_response(
                405, "method-not-allowed", "this server only shows a run that has ended; send calls to a broker"
            )
        shown = {name: value for name, value in headers if name in WANTED_HEADERS}
        return self._check_token(path, shown, token) or self._check_site(method, path, shown)

    def _check_token(self, path: str, shown: Shown, token: bytes | None) -> Response | None:
        accepted = self._token.value
        if accepted is None or path in OPEN_PATHS:
            return None
        if token is None:
            credentials = shown.get(b"authorization", b"")
            token = credentials[len(BEARER) :].strip() if credentials[: len(BEARER)].lower() == BEARER else b""
        if hmac.compare_digest(token, accepted):
            return None
        detail = "this broker asks for a token: send Authorization: Bearer <token>, or put /t/<token> before the path"
        return problem_response(401, "token-required", detail)

    def _check_site(self, method: str, path: str, shown: Shown) -> Response | None:
        host = shown.get(b"host", b"")
        # A caller with the token is not a foreign page. If no token is configured, only a host name of this machine
        # proves that the page did not rebind DNS.
        if self._token.value is None and not self._is_own_host(host):
            name = host.decode("latin-1")[:80]
            detail = f"the host name {name!r} is not one of this broker's; allow it with --allowed-hosts"
            return problem_response(403, "cross-site-request", detail, field="Host", value=name)
        if BROWSER_HEADERS.isdisjoint(shown) or not (changes_something(method, path) or path in TOUCHING_GETS):
            return None
        return self._check_page(shown)

    def _check_page(self, shown: Shown) -> Response | None:
        """Refuse a request that a page of another origin caused, or that a browser only prefetches."""
        origin = shown.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() in self._allowed_origins:
            return None
        if (foreign := foreign_page_header(shown)) is not None:
            return _refuse_page(*foreign, "a page of another site may not change anything here")
        for name in PREFETCH_HEADERS:
            if b"prefetch" in shown.get(name, b""):
                return _refuse_page(name, shown[name], "a browser's prefetch may not change anything here")
        return None

    def _is_own_host(self, host: bytes) -> bool:
        if host in self._own_hosts:
            return True
        own = self._is_own_name(host_name(host))
        if own and len(self._own_hosts) < MOST_HOSTS:
            self._own_hosts.add(host)
        return own

    def _is_own_name(self, name: str | None) -> bool:
        if name is None:
            return False
        return not name or name in self._host_names or name.endswith(".localhost") or is_address(name)


class AuthMiddleware:
    """ASGI middleware: it passes on only what the request guard lets through, and a HEAD request as a GET."""

    def __init__(self, app: ASGIApp, guard: RequestGuard) -> None:
        self._app = app
        self._head_app = HeadAsGet(app, unsafe=NO_HEADS)
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            scope, token = _take_prefix(scope, keeps_slash=scope["method"] == "DELETE")
            refusal = self._guard.refuse(scope["method"], scope["path"], scope["headers"], token)
            app = self._head_app if scope["method"] == "HEAD" else self._app
            await (refusal or app)(scope, receive, send)


def _take_prefix(scope: Scope, *, keeps_slash: bool) -> tuple[Scope, bytes | None]:
    """Cut off `/t/<token>` and a final slash, so that nothing later sees the token; return the scope and the token.

    A DELETE keeps its slash: what follows it is an id, and without one the call would delete all of the kind.
    """
    path: str = scope["path"]
    token = None
    if path.startswith(PREFIX):
        shown, _, rest = path.removeprefix(PREFIX).partition("/")
        token, path = shown.encode(), f"/{rest}"
    if len(path) > 1 and path.endswith("/") and not keeps_slash:
        path = path[:-1]
    if path is scope["path"]:
        return scope, None
    return {**scope, "path": path, "raw_path": path.encode(), ORIGINAL_PATH: scope["path"]}, token


def _refuse_page(header: bytes, value: bytes, detail: str) -> Response:
    name, text = header.decode().title(), value.decode("latin-1")[:80]
    return problem_response(403, "cross-site-request", f"{detail} ({name}: {text})", field=name, value=text)


logger = logging.getLogger(__name__)


class AcceptedToken:
    """The token that callers must show: it can be reloaded from its file; `value` is None if they need none."""

    def __init__(self, token: str | None = None, *, file: Path | None = None) -> None:
        self._file = file
        text = token if file is None else _read(file)
        self.value = text.encode() if text is not None else None

    def reload(self) -> None:
        """Read the token file again. An unusable file changes nothing, so that a typo locks out no caller."""
        if self._file is None:
            return
        try:
            value = _read(self._file).encode()
        except AtroposError as error:
            logger.error("the token stays as it was: %s", error)  # noqa: TRY400 - the line says all there is to say
            return
        logger.info("%s was read again: %s", self._file, "the same token" if value == self.value else "a new token")
        self.value = value


@contextmanager
def reloaded_on_hangup(token: AcceptedToken, *, file: Path | None) -> Iterator[None]:
    """Reload the token file on SIGHUP while the block runs; without a file that signal ends the process as usual."""
    if file is None:
        yield
        return

    def reload(_: int, __: FrameType | None) -> None:
        token.reload()

    former = signal.signal(signal.SIGHUP, reload)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)


def _read(file: Path) -> str:
    try:
        return check_token(read_token_file(file))
    except ValueError as error:
        raise TokenUnreadable(f"--token-file {file}: {error}") from None
