"""Access to served sessions: with a key, and never for a page of another site.

A page that somebody visits on this machine reaches loopback addresses like any program here. It is known by what its
browser says of it: the host name that it asked for, its origin, and a content type that needs no permission.
"""

from __future__ import annotations

import ipaddress
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from environments.sdk.session.address import KEY_PREFIX

OWN_SITES = frozenset({"same-origin", "none"})


def new_secret() -> str:
    """An id or a key that cannot be guessed: 192 random bits."""
    return secrets.token_urlsafe(24)


def refuse_foreign_host(headers: Headers, names: frozenset[str]) -> None:
    """Refuse a name that somebody may have pointed at this machine."""
    host = headers.get("host", "")
    if not _is_own(host, names):
        raise HTTPException(403, f"the host {host[:80]!r} is no name of this server; --env.session_url names one")


def refuse_foreign_page(headers: Headers) -> None:
    """Refuse requests that a page of another site has caused."""
    host = headers.get("host", "")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if (origin is not None and urlsplit(origin).netloc != host) or (site is not None and site not in OWN_SITES):
        raise HTTPException(403, f"pages of another site ({origin or site}) may not use sessions")


def refuse_other_content(method: str, headers: Headers) -> None:
    """Refuse bodies that are not said to be JSON: those a page may send anywhere without asking."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise HTTPException(415, f"the content type must be application/json, not {kind[:80] or 'missing'}")


def split_key(path: str, headers: Headers) -> tuple[str, str]:
    """The key of a request, from its header or from `/t/KEY/` before the path, and the path without it."""
    if path.startswith(KEY_PREFIX):
        key, _, rest = path.removeprefix(KEY_PREFIX).partition("/")
        return key, f"/{rest}"
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else ""), path


def require_key(given: str, *accepted: str) -> None:
    if not any(secrets.compare_digest(given.encode(), key.encode()) for key in accepted):
        raise HTTPException(401, "a session asks for its key: send Authorization: Bearer KEY, the api_key of a client")


def _is_own(host: str, names: frozenset[str]) -> bool:
    """An address, a loopback name, or one of `names`; HTTP without a host is no browser's."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if not name or name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
