"""Who may ask: not the pages of other sites, not strangers where a key or token is set."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from example_trainer.serving.problems import Problem

Headers = Iterable[tuple[bytes, bytes]]


def refuse_foreign_page(headers: Headers) -> None:
    """A browser tells when another site's page sends a request; such a page has no business here."""
    host = origin = site = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
    if site == b"cross-site" or (origin and urlsplit(origin).netloc != host):
        detail = f"requests from pages of another site ({origin.decode(errors='replace')}) are not answered"
        raise Problem(403, "foreign-origin", detail)


def refuse_foreign_host(host: str, names: Sequence[str]) -> None:
    """An address, `localhost`, or one of `names`: anything else may be a name that somebody points at this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost" or name in names:
        return
    try:
        ip_address(name)
    except ValueError:
        detail = f"Host {host!r} is not a name of this server; allow it with --allowed-hosts"
        raise Problem(403, "foreign-host", detail) from None


def refuse_without_key(headers: Headers, keys: Sequence[bytes]) -> None:
    if not keys:
        return
    given = bearer(headers)
    if not any(secrets.compare_digest(given, key) for key in keys):
        detail = "this server was started with --api-key; send 'Authorization: Bearer <key>', or the bridge token so"
        raise Problem(401, "key-needed", detail)


def bearer(headers: Headers) -> bytes:
    """The bearer token of a request, or nothing."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token if scheme.lower() == b"bearer" else b""
    return b""
