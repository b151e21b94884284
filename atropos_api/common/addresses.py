"""The addresses and hosts that programs are told, judged when they are typed and not when nobody answers there."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

_SCHEMES: Final = ("http://", "https://")
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def require_address(url: str) -> str:
    """`url`, if a server can be behind it; otherwise `ValueError` says what to write."""
    if not url.startswith(_SCHEMES):
        scheme, separator, rest = url.partition("://")
        host = rest if separator else scheme
        proposal = f"; did you mean http://{host}?" if _is_place(host) else ""
        raise ValueError(f"an address begins with http:// or https://{proposal}")
    if not _is_place(url.partition("://")[2]):
        raise ValueError("an address names a host and maybe a port, such as http://localhost:8000")
    return url


def require_host(host: str) -> str:
    """`host`, if it is a name or an IP address without scheme and port."""
    if not _is_host(host):
        raise ValueError("a host is a name or an address, without scheme and port; the port has an option of its own")
    return host


Address = Annotated[str, AfterValidator(require_address)]
Host = Annotated[str, AfterValidator(require_host)]


def _is_place(text: str) -> bool:
    """Whether `text` begins with a host, and where it names a port, one that there is."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    return host is not None and _is_host(host) and port != 0 and not parts.netloc.endswith(":")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _NAME.fullmatch(host) is not None
    return True
