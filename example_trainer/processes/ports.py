"""Ports on this host, and the sockets of a server.

A launcher finds a free port, or names the process that holds a taken one. A server's socket is bound and listening
before anything is loaded, or inherited from the process that starts it. A process that replaces one server by another
owns the listening socket and gives each server a copy, so that connections queue up while none accepts, and three
more sockets: one on which the old server hands over its connections, one on which the new server hands over its own
when it stops, and one on which a byte tells the starter that the server is ready to serve. A standby server, which has
imported everything before it is needed, has a fourth, on which the starter tells it what to serve.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from example_trainer.errors import CannotServe, TrainerError
from example_trainer.processes.tree import describe

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535


class PortTaken(TrainerError):
    """A port that the user asked for is held by another process, or is not for this user."""


class NoPort(TrainerError):
    """A value that is not a port number."""


def free_port(host: str = LOOPBACK, *, held: contextlib.ExitStack | None = None) -> int:
    """Return a port on which no process listens; see `free_ports`."""
    return free_ports(1, host, held=held)[0]


def free_ports(count: int, host: str = LOOPBACK, *, held: contextlib.ExitStack | None = None) -> tuple[int, ...]:
    """Return `count` different ports on which no process listens.

    No other process is assigned one of them until `held` is closed, while our programs can listen there. Between the
    choice and the first server's start, imports and a model are loaded for half a minute, in which another launcher
    may choose ports.
    """
    with contextlib.ExitStack() as bound:
        ports = tuple(_bind(bound, host, 0) for _ in range(count))
        if held is not None:
            held.push(bound.pop_all())
        return ports


def require_free(port: int, *, flag: str, host: str = LOOPBACK, held: contextlib.ExitStack | None = None) -> int:
    """Return `port` if it is free, else raise `PortTaken` with the holder and the flag; `held` as in `free_ports`."""
    with contextlib.ExitStack() as bound:
        try:
            _bind(bound, host, port)
        except OSError as error:
            # A port below 1024 may be free, but not every user may listen on it.
            what = f"is taken{_by(port)}" if error.errno == errno.EADDRINUSE else "cannot be used"
            raise PortTaken(f"port {port} {what} ({error.strerror}); choose another with {flag}") from None
        if held is not None:
            held.push(bound.pop_all())
    return port


def _bind(bound: contextlib.ExitStack, host: str, port: int) -> int:
    """Bind a socket that never listens and return its port.

    The kernel assigns such a port to no process that asks for any port; a process that asks for it by number with
    SO_REUSEADDR, as all servers do, can listen on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = bound.enter_context(socket.socket(family, socket.SOCK_STREAM))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return int(held.getsockname()[1])


def as_port(given: object, flag: str) -> int:
    """Convert a typed or configured value to a port; raises `NoPort` if it is not one."""
    try:
        port = int(str(given))
    except ValueError:
        port = 0
    if not 1 <= port <= LAST_PORT:
        raise NoPort(f"{flag} {given}: not a port; ports are 1 to {LAST_PORT}")
    return port


def holder(port: int) -> psutil.Process | None:
    """Return the process that listens on `port`, if this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None


def _by(port: int) -> str:
    """Return ` by pid 12 (its command)`, as far as this user may see it."""
    try:
        process = holder(port)
    except psutil.Error:  # it has ended meanwhile
        return ""
    return f" by {describe(process)}" if process else f" by a process that user {os.getuid()} may not inspect"


INHERITED_SOCKETS = "ATROPOS_SERVER_SOCKETS"
BACKLOG = 2048
BEGUN_ANSWERS_SECONDS = 30.0
"""The time that a replaced or drained server gives to answers that have begun, after that for running requests."""

_LONGEST_SETTINGS_BYTES = 1 << 16

DONE = b"done"
"""The last message of a handover."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSockets:
    """A server's listening socket, and its sockets to the servers before and after it and to its starter, or None."""

    listening: socket.socket
    predecessor: socket.socket | None = None
    successor: socket.socket | None = None
    loaded: socket.socket | None = None
    standby: socket.socket | None = None

    def tell_loaded(self) -> None:
        """Tell the starter that this server is loaded and waits only for the server before it."""
        if self.loaded is not None:
            self.loaded.send(b"1")
            self.loaded.close()

    def wait_for_settings(self) -> dict[str, Any] | None:
        """Return the settings that change when this server begins to serve: none at once if it is not a standby.

        A standby waits for them, and gets None once its starter does not need it any more.
        """
        if self.standby is None:
            return {}
        with self.standby:
            message = self.standby.recv(_LONGEST_SETTINGS_BYTES)
        return json.loads(message) if message else None


def open_sockets(host: str, port: int, environ: MutableMapping[str, str]) -> ServerSockets:
    """Return the inherited sockets, or a new listening one; raises `CannotServe` if the port is taken."""
    inherited = environ.pop(INHERITED_SOCKETS, None)
    if inherited is None:
        return ServerSockets(listen(host, port))
    numbers = dict(entry.split("=") for entry in inherited.split(","))
    sockets = {name: socket.socket(fileno=int(number)) for name, number in numbers.items()}
    for each in sockets.values():
        each.set_inheritable(False)
    return ServerSockets(**sockets)


def release_inherited() -> None:
    """Release the TCP sockets that a forked process has inherited: with them it would hold its parent's port.

    An engine of 1 GB needs seconds to end after its killed server; one that was started again meanwhile found its port
    taken. The descriptors lead to the null device from now on: closed, their numbers would be given to other files,
    which the inherited objects could close.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor by which the folder was listed is closed
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _is_tcp(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family in {socket.AF_INET, socket.AF_INET6} and copy.type == socket.SOCK_STREAM


def as_inherited(sockets: Mapping[str, socket.socket]) -> str:
    """Return the value of `INHERITED_SOCKETS` for a child that is started with these descriptors."""
    return ",".join(f"{name}={each.fileno()}" for name, each in sockets.items())


class HandoverChannel:
    """A socket pair from one server to the next; the starter keeps both ends, so that either may exit first."""

    def __init__(self) -> None:
        self.sender, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def end(self) -> None:
        """Send the last message for a server that has exited for any reason."""
        try:
            self.sender.send(DONE, socket.MSG_DONTWAIT)
        except OSError as error:
            logger.debug("no server waits for connections: %s", error)

    def close(self) -> None:
        """Close both ends here: with no successor, the server's handover fails before it sends any connection."""
        self.sender.close()
        self.receiver.close()


def listen(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """Return a listening socket: from now on the port is taken, and clients queue up.

    Raises `CannotServe`, which names the flag of the port, if that fails.
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
            raise CannotServe(f"port {port} is taken{_by(port)}; choose another with {flag}") from error
        hint = f"check {flag.replace('port', 'host')} and {flag}"
        raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}; {hint}") from error
    return listening
