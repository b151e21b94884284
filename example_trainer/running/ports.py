"""Ports on this host: a free one, and who holds a taken one."""

from __future__ import annotations

import contextlib
import socket

import psutil

from example_trainer.errors import TrainerError
from example_trainer.running.process_tree import describe

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535


class PortTaken(TrainerError):
    """A port the user asked for is held by another process."""


class NoPort(TrainerError):
    """A number that no port has."""


def free_port(host: str = LOOPBACK, *, held: contextlib.ExitStack | None = None) -> int:
    """A port nobody listens on now; see `free_ports`."""
    return free_ports(1, host, held=held)[0]


def free_ports(count: int, host: str = LOOPBACK, *, held: contextlib.ExitStack | None = None) -> tuple[int, ...]:
    """So many ports nobody listens on now, each another.

    Nobody else is given one of them until `held` is closed, while programs of ours can listen there: between the choice
    and the first server lie imports and a model, half a minute in which another launcher chooses its own.
    """
    with contextlib.ExitStack() as bound:
        ports = tuple(_bind(bound, host, 0) for _ in range(count))
        if held is not None:
            held.push(bound.pop_all())
        return ports


def require_free(port: int, *, flag: str, host: str = LOOPBACK, held: contextlib.ExitStack | None = None) -> int:
    """`port`, if it can be listened on; otherwise `PortTaken` names the holder and the flag; `held` as above."""
    with contextlib.ExitStack() as bound:
        try:
            _bind(bound, host, port)
        except OSError as error:
            raise PortTaken(f"port {port} is taken{_by(port)} ({error.strerror}); choose another with {flag}") from None
        if held is not None:
            held.push(bound.pop_all())
    return port


def _bind(bound: contextlib.ExitStack, host: str, port: int) -> int:
    """Bind a socket that never listens: a port so bound is given to nobody who asks for any, and may be listened on by
    whoever asks for it by number with SO_REUSEADDR, as all servers do.
    """
    held = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return int(held.getsockname()[1])


def as_port(given: object, flag: str) -> int:
    """A port that was typed or stood in a file; raises `NoPort` for what is none."""
    try:
        port = int(str(given))
    except ValueError:
        port = 0
    if not 1 <= port <= LAST_PORT:
        raise NoPort(f"{flag} {given}: no port; ports are 1 to {LAST_PORT}")
    return port


def holder(port: int) -> psutil.Process | None:
    """The process that listens on `port`, where this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None


def _by(port: int) -> str:
    try:
        process = holder(port)
    except psutil.Error:
        return ""
    return f" by {describe(process)}" if process else ""
