"""The names, versions and addresses by which programs and servers are identified.

`version_line` is what `--version` of every command prints. `server_stem` reduces the names of an environment server,
which a run file gives as a file, a module, or the name under which a package offers it. `fingerprint` lets an
environment and its inference server check that their tokenizers agree: if two of one size differ in a few ids, training
reports no error, but its tokens are not those of the model. `require_address` and `require_host` check addresses when
they are set, not when a connection fails; `find_host_error` finds the lookup that has failed then.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

DISTRIBUTION: Final = "atropos-grpo"
NOT_INSTALLED: Final = "0+not.installed"
"""The version reported if the packages are imported from a source tree that was never installed."""

LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
"""Addresses to listen on at which the broker requires no token."""
EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
"""Addresses to listen on that stand for all addresses of the machine."""


def package_version() -> str:
    """Return the installed version of the distribution that all three packages belong to."""
    # Imported here: it takes longer than all else that `--help` loads.
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def version_line(program: str) -> str:
    """Return the line that `program --version` prints, such as `run-api (atropos-grpo) 0.1.0`."""
    return f"{program} ({DISTRIBUTION}) {package_version()}"


def server_stem(name: str) -> str:
    """Return the last part of a server's name: `arithmetic_server`, whether the name is a file or a module."""
    return name.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return 32 hexadecimal digits that change with every token and every id."""
    ordered = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    lines = "".join(f"{index}\t{token!r}\n" for token, index in ordered)
    return hashlib.blake2b(lines.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


_SCHEMES: Final = ("http://", "https://")
_LABEL: Final = "[A-Za-z0-9_-]{1,63}"
_NAME: Final = re.compile(rf"(?!-){_LABEL}(\.{_LABEL})*(?<!-)\.?")
"""A host's name; one with an empty label, or with a longer one, is an error of Python's lookup, not an unknown host."""


def require_address(url: str) -> str:
    """Return `url` if it can be a server's address; otherwise `ValueError` says what to write."""
    if not url.startswith(_SCHEMES):
        scheme, separator, rest = url.partition("://")
        host = rest if separator else scheme
        proposal = f"; did you mean http://{host}?" if _is_place(host) else ""
        raise ValueError(f"an address begins with http:// or https://{proposal}")
    if not _is_place(url.partition("://")[2]):
        raise ValueError("an address names a host and maybe a port, such as http://localhost:8000")
    return url


def require_host(host: str) -> str:
    """Return `host` if it is a name or an IP address without scheme and port, else raise `ValueError`."""
    if not _is_host(host):
        raise ValueError("a host is a name or an address, without scheme and port; the port has an option of its own")
    return host


def host_in_url(host: str) -> str:
    """Return a host as URLs contain it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_this_host(host: str) -> bool:
    """Return True if a host is this machine: its name, the address of an interface, or the address of all interfaces.

    Another name for it that only DNS knows counts as another machine, because a lookup may take seconds.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        own = socket.gethostname().lower()
        return host.lower() in {"localhost", own, own.partition(".")[0]}
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
            probe.bind((str(address), 0))  # the kernel binds only addresses of this machine
    except OSError:
        return address.is_loopback  # a machine without IPv6 cannot bind even its own `::1`
    return True


def split_address(text: str) -> tuple[str, int | None]:
    """Return host and port of `HOST` or `HOST:PORT`; otherwise `ValueError` says what to write."""
    if not _is_place(text) or urlsplit(f"//{text}").netloc != text or "@" in text:
        raise ValueError(f"{text!r} is not an address; write HOST or HOST:PORT, such as 10.0.0.1:29400")
    parts = urlsplit(f"//{text}")
    return str(parts.hostname), parts.port


Address = Annotated[str, AfterValidator(require_address)]

Host = Annotated[str, AfterValidator(require_host)]


def _is_place(text: str) -> bool:
    """Return True if `text` begins with a host, and its port, if it names one, is valid."""
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


def find_host_error(error: BaseException | None, *, answered: bool = False) -> socket.gaierror | None:
    """Return the failed lookup of a mistyped host name among an error and its causes, if there is one.

    There is none if the host has `answered` before, or if the name server did not answer or refused to: name servers
    have outages too, and the name of a pod that is replaced is unknown for a while.
    """
    seen: set[int] = set()  # a chain of causes may lead back to itself
    while error is not None and id(error) not in seen:
        if isinstance(error, socket.gaierror):
            return None if answered or error.errno in {socket.EAI_AGAIN, socket.EAI_FAIL} else error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
