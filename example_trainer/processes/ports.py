"""Ports on this host: a free one, and who holds a taken one.

The sockets of a server: bound and listening before anything is loaded, or inherited from the process that starts it.

A process that replaces one server by another owns the listening socket and gives each server a copy, so that
connections queue up while none accepts, and two more: one on which the server before hands over its connections, one on
which this server hands over its own when it stops. A byte on the fourth tells the starter that the server could serve.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

from atropos_api.common.secrets import program_words
from example_trainer.errors import CannotServe, TrainerError
from example_trainer.processes.tree import describe

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


INHERITED_SOCKETS = "ATROPOS_SERVER_SOCKETS"

BACKLOG = 2048

BEGUN_ANSWERS_SECONDS = 30.0
"""The time that a replaced server gives to answers that have begun, once that for running requests is over."""

DONE = b"done"
"""The last message of a handover."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSockets:
    """The socket that a server listens on, and its channels to the servers before and after it, or None."""

    listening: socket.socket
    predecessor: socket.socket | None = None
    successor: socket.socket | None = None
    loaded: socket.socket | None = None

    def tell_loaded(self) -> None:
        """Let the starter know that only the server before stands in the way."""
        if self.loaded is not None:
            self.loaded.send(b"1")
            self.loaded.close()


def open_sockets(host: str, port: int, environ: MutableMapping[str, str]) -> ServerSockets:
    """Those that were inherited, or one that listens from now on; raises `CannotServe` where the port is taken."""
    inherited = environ.pop(INHERITED_SOCKETS, None)
    if inherited is None:
        return ServerSockets(listen(host, port))
    numbers = dict(entry.split("=") for entry in inherited.split(","))
    sockets = {name: socket.socket(fileno=int(number)) for name, number in numbers.items()}
    for each in sockets.values():
        each.set_inheritable(False)
    return ServerSockets(**sockets)


def as_inherited(sockets: Mapping[str, socket.socket]) -> str:
    """The value of `INHERITED_SOCKETS` for a child that is started with these descriptors."""
    return ",".join(f"{name}={each.fileno()}" for name, each in sockets.items())


class HandoverChannel:
    """The way from one server to the next; open at both ends here, so that either may end before the other begins."""

    def __init__(self) -> None:
        self.gives, self.takes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def end(self) -> None:
        """On behalf of a server that has ended, however it did."""
        try:
            self.gives.send(DONE, socket.MSG_DONTWAIT)
        except OSError as error:
            logger.debug("nobody waits for connections: %s", error)

    def close(self) -> None:
        """Nobody will take what is given: the server finds out before it gives anything."""
        self.gives.close()
        self.takes.close()


def listen(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A socket that listens there: from this moment on the port is taken, and clients queue up.

    Raises `CannotServe`, naming the flag of the port, where it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotServe(f"port {port} is taken{_by_whom(port)}; choose another with {flag}") from error
        hint = f"check {flag.replace('port', 'host')} and {flag}"
        raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}; {hint}") from error
    return listening


def _by_whom(port: int) -> str:
    """`by process 12 (its command)`, as far as this user may know it."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f" by process {connection.pid} ({program_words(psutil.Process(connection.pid).cmdline())})"
    except psutil.Error:
        pass
    return f" by a process that user {os.getuid()} may not inspect"
