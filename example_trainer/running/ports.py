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


def free_port(host: str = LOOPBACK) -> int:
    """A port nobody listens on now."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = LOOPBACK) -> tuple[int, ...]:
    """So many ports nobody listens on now, each another."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)


def require_free(port: int, *, flag: str, host: str = LOOPBACK) -> int:
    """`port`, if it can be listened on; otherwise `PortTaken` names the holder and the flag."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(f"port {port} is taken{_by(port)} ({error.strerror}); choose another with {flag}") from None
    return port


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
