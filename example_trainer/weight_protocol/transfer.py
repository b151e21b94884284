"""Transfers of weights from trainer to servers: adapters as one body, and the meeting of processes in a group.

An adapter is one safetensors body with its PEFT configuration. The configuration is in the safetensors metadata. The
body is what `adapter_model.safetensors` would hold, so a body that is written to a file next to its configuration is
an adapter that PEFT and a stock vLLM can load. The receiver checks the header before it passes a body on.

The processes of a group meet at a TCP store, for which torch has no token: any process that reaches its port can join
the group or disturb it. So the store listens only on the address it is given, and gloo's connections stay on the
interface from which that address is reached. Only for an address that belongs to no local interface (behind a NAT) does
the store listen on all interfaces.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed

MEMORY_PATH = "memory:"
"""Prefix of the path of an adapter that is kept in memory and not in a file."""

_CONFIG = "adapter_config"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """A safetensors body together with its parsed header."""

    body: bytes
    config: dict[str, Any]
    """The content of `adapter_config.json`."""
    layout: dict[str, Any]
    """The header's entry for each tensor: dtype, shape and data offsets."""
    data_start: int

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> AdapterPayload:
        """Build a payload from tensors under their PEFT names; they may be on any device."""
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        body = save(plain, metadata={_CONFIG: json.dumps(config, default=_plain), "format": "pt"})
        return cls.read(body)

    @classmethod
    def read(cls, body: bytes) -> AdapterPayload:
        """Parse a body; raise `ValueError` with the reason if it is not an adapter in this format."""
        length = int.from_bytes(body[:_LENGTH_BYTES], "little")
        if len(body) < _LENGTH_BYTES or length > len(body) - _LENGTH_BYTES:
            raise ValueError("the body is not a safetensors file: its header is longer than the body")
        try:
            header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + length])
            config = dict(json.loads(header["__metadata__"][_CONFIG]))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its metadata lack {_CONFIG}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the body is not an adapter in safetensors format: {reason}") from error
        layout = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return cls(body, config, layout, _LENGTH_BYTES + length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors as copies in their own memory."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(self.body))
        except SafetensorError as error:
            raise ValueError(f"the body is not a safetensors file: {error}") from error

    def digest(self) -> str:
        """Return a checksum over configuration and tensors; it is equal on both sides if nothing was lost in transfer.

        The order of the metadata's entries does not count, because it differs from one serialisation to the next.
        """
        described = json.dumps([self.config, self.layout], sort_keys=True).encode()
        total = hashlib.blake2b(described, digest_size=16)
        total.update(memoryview(self.body)[self.data_start :])
        return total.hexdigest()


def _plain(value: Any) -> Any:
    """Convert the sets and enumerations in PEFT's configuration to JSON values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INTERFACE_VARIABLES = (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME")

dist: Any = torch.distributed  # its stubs lack most of the names that are used here


def is_loopback(host: str) -> bool:
    """Return True if `host`, an address or a name, resolves to the loopback interface and nothing else."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def make_store(host: str, port: int, *, world_size: int, is_master: bool, timeout: timedelta) -> Any:
    """Return the store at `host:port`: the master's listens there, those of the others connect to it."""
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
    """Return a gloo group of processes that met at `host`; it uses the interface from which `host` is reached.

    By itself torch takes the address that this machine's name resolves to, which is a loopback one on Debian and where
    the name is unknown: members on other hosts then wait for each other without end. GLOO_SOCKET_IFNAME takes
    precedence.
    """
    address = host if is_loopback(host) else local_address(host)
    if address is None or (GLOO_INTERFACE in os.environ and not is_loopback(host)):
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch gives them no other name
    options._timeout = timeout  # noqa: SLF001 - same
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001 - same
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def local_address(host: str) -> str | None:
    """Return this machine's address on the way to `host`, or None if there is no way; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


@contextlib.contextmanager
def default_group_near(host: str) -> Iterator[None]:
    """Make the groups that torch creates inside the block use the interface from which `host` is reached.

    NCCL chooses among several by itself, so it is told only to stay on loopback.
    """
    names = INTERFACE_VARIABLES if is_loopback(host) else (GLOO_INTERFACE,)
    wanted = dict.fromkeys(names, _interface_of("127.0.0.1" if is_loopback(host) else local_address(host)))
    with environment({name: value for name, value in wanted.items() if value and name not in os.environ}):
        yield


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore their former values at its end."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on that address, or None if it is not an address of this machine."""
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
        raise RuntimeError(f"cannot listen on {host}:{port} ({error.strerror})") from error
    return listener


def _interface_of(address: str | None) -> str | None:
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(entry.address.split("%")[0] == address for entry in own)), None)
