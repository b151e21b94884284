"""The store at which processes meet to form a process group: it listens on the address that was named, not on all.

Whoever reaches a store's port can join the group or upset it; torch has no token for it. So an address of this host is
listened on alone, a loopback address on the loopback interface, and gloo's own connections of such a group stay there
as well. Only an address that is no interface's, as behind a NAT, is listened for on all.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

dist: Any = torch.distributed  # whose stubs leave out most of what is used here


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback interface and nothing else, by address or by name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def make_store(host: str, port: int, *, world_size: int, is_master: bool, timeout: timedelta) -> Any:
    """The store at `host:port`: the master's listens there, those of the others connect."""
    listener = _listen(host, port) if is_master else None
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        **({} if listener is None else {"master_listen_fd": listener.detach()}),  # the store closes it
    )


def make_gloo_group(store: Any, rank: int, world_size: int, *, host: str, timeout: timedelta) -> Any:
    """A gloo group of processes that met at `host`, over the loopback interface where `host` is there."""
    if not is_loopback(host):
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch gives them no other name
    options._timeout = timeout  # noqa: SLF001 - same
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001 - same
    return dist.ProcessGroupGloo(store, rank, world_size, options)


@contextlib.contextmanager
def default_group_on_loopback(host: str) -> Iterator[None]:
    """While this lasts, groups that torch makes by itself use the loopback interface, if `host` is there."""
    wanted = dict.fromkeys(INTERFACE_VARIABLES, _loopback_interface()) if is_loopback(host) else {}
    added = {name: value for name, value in wanted.items() if value and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket on that address; None where it is no address of this machine."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise RuntimeError(f"{host}:{port} cannot be listened on ({error.strerror})") from error
    return listener


def _loopback_interface() -> str | None:
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(entry.address == "127.0.0.1" for entry in addresses)), None)
