"""Access checks: no requests from pages of other sites, and none without the key or token where one is set."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from fastapi import Request

from atropos_api.common.cross_site import PAGE_HEADERS, SAFE_METHODS, foreign_page_header, host_name, is_address
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState, State

Headers = Iterable[tuple[bytes, bytes]]

_COSTLY_GETS = frozenset({"/bridge/debug", "/health_generate"})

_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa")
"""Domains under which no name can be registered, so that no attacker can point one at this machine."""


class AllowedHosts:
    """The host names under which this server accepts requests, and the pages whose requests it accepts.

    A request that a page of another site makes a browser send carries that page's origin. A page whose own name has
    been pointed at this machine (DNS rebinding) sends requests under that name, which is public and not this server's.
    Where any host on a network may send requests anyway, or keys are needed, the name is checked only for browsers.
    """

    def __init__(self, *, host: str, names: Iterable[str], origins: Iterable[str], has_keys: bool) -> None:
        self._names = {host.lower(), *(name.lower() for name in names)}
        self._origins = {origin.lower() for origin in origins}
        self._trusts_names = has_keys or not _is_loopback(host)

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise the refusal for a request that a page of another site has caused."""
        shown = dict(headers)
        origin = shown.get(b"origin")
        if origin is not None and not self._origins.isdisjoint({_text(origin).lower(), "*"}):
            return
        by_browser = not shown.keys().isdisjoint(PAGE_HEADERS)
        guarded = by_browser and (method not in SAFE_METHODS or path in _COSTLY_GETS)
        if guarded or not self._trusts_names:
            self._check_host(shown.get(b"host", b""))
        if guarded:
            refuse_foreign_page(shown)

    def _check_host(self, host: bytes) -> None:
        """Refuse a host name that an attacker could own."""
        name = host_name(host)
        if "*" in self._names or (name is not None and (name in self._names or is_private(name))):
            return
        detail = f"Host {_text(host)!r} is not a name of this server; allow it with --allowed-hosts"
        raise Problem(403, "foreign-host", detail)


def is_private(name: str) -> bool:
    """Return True for an address, a single word, a domain that is never public, or no name, which no browser sends."""
    if "." not in name and ":" not in name:
        return True
    return name.endswith(_PRIVATE_DOMAINS) or is_address(name)


def refuse_foreign_page(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request that, by a browser's headers, comes from another site's page."""
    if (foreign := foreign_page_header(headers)) is not None:
        raise _foreign_page(*foreign)


def _foreign_page(name: bytes, value: bytes) -> Problem:
    header = f"{name.decode().title()}: {_text(value)}"
    detail = f"requests from pages of another site ({header}) are refused; permit a site with --allowed-origins"
    return Problem(403, "foreign-origin", detail)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _text(value: bytes) -> str:
    return value.decode("latin-1")[:200]


def refuse_without_key(headers: Headers, keys: Sequence[bytes]) -> None:
    if not keys:
        return
    given = bearer(headers)
    if not any(secrets.compare_digest(given, key) for key in keys):
        detail = (
            "this server was started with --api-key; send 'Authorization: Bearer <key>' with it or the bridge token"
        )
        raise Problem(401, "key-needed", detail)


def bearer(headers: Headers) -> bytes:
    """Return the bearer token of a request, or nothing."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token if scheme.lower() == b"bearer" else b""
    return b""


def require_token(request: Request, state: State) -> None:
    """Refuse a request without the bridge token, or from another site's page."""
    headers = request.scope["headers"]
    refuse_foreign_page(dict(headers))
    if not holds_token(request, state):
        detail = (
            "changing weights needs 'Authorization: Bearer <bridge token>': bridge_token in the manifest, or the value "
            "of --bridge-token; if the server is another run's, name another port (--vllm-port)"
        )
        raise Problem(401, "token-needed", detail)


def holds_token(request: Request, state: ServerState) -> bool:
    return secrets.compare_digest(bearer(request.scope["headers"]), state.bridge_token.encode())
