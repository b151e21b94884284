"""Recognition of requests that a page of another site has made a browser send.

A browser adds headers that the page cannot change: the host that it asked for, and the page's origin. Broker and
inference server refuse such requests; each has its own rules for host names and for the calls that it guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PAGE_HEADERS: Final = frozenset({b"origin", b"referer", b"sec-fetch-site"})
"""Headers that browsers add and programs do not."""

_OWN_SITES: Final = frozenset({b"same-origin", b"none"})


def foreign_page_header(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes] | None:
    """Return the header that names a page of another origin as the request's cause, with its value; else None."""
    host = headers.get(b"host", b"").lower()
    for name in (b"origin", b"referer"):
        value = headers.get(name)
        if value is not None and _netloc(value) != host:
            return name, value
    site = headers.get(b"sec-fetch-site")
    return None if site is None or site in _OWN_SITES else (b"sec-fetch-site", site)


def host_name(host: bytes) -> str | None:
    """Return a Host header's name without its port; empty if none was sent, None if the header is malformed."""
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return None


def is_address(name: str) -> bool:
    """Return True for an IP address, which DNS rebinding cannot point at another machine."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _netloc(url: bytes) -> bytes:
    """Return host and port of a URL; `null`, which equals no host, if it is malformed or is `null`."""
    try:
        return urlsplit(url.decode("latin-1")).netloc.lower().encode("latin-1") or b"null"
    except ValueError:
        return b"null"
