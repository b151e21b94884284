"""Transfer of the clients' connections from one server to the next, so that no client sees an interruption.

A client keeps its connection and may send its next request at any moment: closing the connection would lose a request
in flight. So the connection itself is passed to the next process, as a file descriptor over a Unix socket (the server
channel). An idle connection is passed as it is; one whose request has no answer yet is passed with the bytes of that
request, which the next server reads as if they had just arrived. An answer that has begun is finished here first. The
next server answers no client before this one has passed everything: a client that has seen a version never sees an
older one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from atropos_api.common.cross_site import SAFE_METHODS
from atropos_api.common.http_upgrades import UpgradeIgnored
from example_trainer.processes.ports import BEGUN_ANSWERS_SECONDS, DONE, ServerSockets
from example_trainer.serving.startup import StartingAnswers

logger = logging.getLogger(__name__)

Connections = set[Any]

_CHANGING = ("/bridge/", "/lora/", "_lora_adapter")
_HELLO = b"hello"
_MOST_AT_ONCE = 60
_LONGEST_MESSAGE = 1 << 16
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class ReceivedConnection:
    """A connection received from another server, with the bytes that server had read of a request on it."""

    connection: socket.socket
    received: bytes


class Connection(UpgradeIgnored):
    """One client's connection, which can be passed to another process until an answer to its request has begun."""

    def __init__(self, *args: Any, received: bytes = b"", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_before = received
        self._received = bytearray()
        """The bytes that another server would have to read again; empty for a request that it may not repeat."""
        self._requests: list[RequestResponseCycle] = []
        """Requests since the connection was last idle: several, if a client does not wait for answers."""
        self._in_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._of_before:
            self.data_received(self._of_before)
            self._of_before = b""

    def data_received(self, data: bytes) -> None:
        self._forget_if_idle()
        if self._repeatable:
            self._received += data
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.ignores_head:
            return
        if self.cycle is not None and self.cycle not in self._requests:
            self._requests.append(self.cycle)
        if not self._repeatable:
            self._received.clear()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._forget_if_idle()

    @property
    def can_ever_be_passed(self) -> bool:
        """False for an encrypted connection: its keys are in this process."""
        return self.transport is not None and self.transport.get_extra_info("sslcontext") is None

    def can_be_passed(self, *, mid_request: bool) -> bool:
        """Return True if another process can continue it without loss or, if `mid_request`, answer its request."""
        if not self.can_ever_be_passed or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self._idle or (mid_request and self._repeatable)

    def detach(self) -> tuple[int, bytes]:
        """Return a descriptor of the connection and the bytes of its requests, which end here without an answer."""
        received = b"" if self._idle else bytes(self._received)
        descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        for each in self._requests:
            each.disconnected = True  # from here on nothing is written, and the request is aborted
            each.message_event.set()
        self.transport.abort()
        return descriptor, received

    @property
    def _idle(self) -> bool:
        return not self._in_message and all(each.response_complete for each in self._requests)

    @property
    def _repeatable(self) -> bool:
        return all(not each.response_started and is_repeatable(each.scope) for each in self._requests)

    def _forget_if_idle(self) -> None:
        if self._idle:
            self._received.clear()
            self._requests.clear()


class HandoverServer(uvicorn.Server):
    """A uvicorn server that can receive connections and pass them on. It has no signal handlers: its owner stops it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.arrived: Sequence[ReceivedConnection] = ()
        """Connections to start with, received from the previous server."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        loop = asyncio.get_running_loop()
        for each in self.arrived:
            await loop.connect_accepted_socket(partial(self._connection, each.received), each.connection)
        for listening in sockets or ():
            ssl, backlog = self.config.ssl, self.config.backlog
            self.servers.append(await loop.create_server(self._connection, sock=listening, ssl=ssl, backlog=backlog))

    def stop_accepting(self) -> None:
        """Accept no more connections; new ones wait for the next server, if there is one."""
        for listening in getattr(self, "servers", ()):
            listening.close()

    def _connection(self, received: bytes = b"") -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            received=received,
        )


def is_repeatable(scope: Mapping[str, Any]) -> bool:
    """Return True if another server may answer the request instead: it only samples tokens or reads."""
    return scope["method"] in SAFE_METHODS or not any(part in scope["path"] for part in _CHANGING)


async def hand_over(
    connections: Connections, channel: socket.socket, *, drain_seconds: float, is_drained: Callable[[], bool]
) -> bool:
    """Pass every connection to the server at the channel's other end; return False if there is no such server.

    Running requests get `drain_seconds` to end here, or until `is_drained` returns True; a request not answered by then
    is answered by the next server, and only answers that have begun keep this server running longer.
    """
    channel.setblocking(False)
    began = time.monotonic()
    try:
        channel.send(_HELLO)
        while unpassed := [each for each in connections if isinstance(each, Connection) and each.can_ever_be_passed]:
            seconds = time.monotonic() - began
            if seconds > drain_seconds + BEGUN_ANSWERS_SECONDS:
                logger.warning("%d answers are cut off: they were not complete after the drain", len(unpassed))
                break
            mid_request = seconds >= drain_seconds or is_drained()
            ready = [each for each in unpassed if each.can_be_passed(mid_request=mid_request)]
            for first in range(0, len(ready), _MOST_AT_ONCE):
                # While the ones before were sent, a client may have left, or have asked what must be answered here.
                still = [
                    each for each in ready[first : first + _MOST_AT_ONCE] if each.can_be_passed(mid_request=mid_request)
                ]
                await _send(channel, _detach(still))
            await asyncio.sleep(_LOOK_SECONDS)
        await _writable(channel)
        channel.send(DONE)
    except ConnectionError:
        return False  # there is no next server
    except OSError as error:  # descriptors are limited, for this process and for all in flight
        logger.warning("the clients' connections are closed: they cannot be handed to the next server: %s", error)
        return False
    return True


async def take_over(
    sockets: ServerSockets, starting: StartingAnswers | None, stop: asyncio.Event
) -> list[ReceivedConnection] | None:
    """Wait until this server may answer; return the received connections, or None if it was told to stop.

    It waits until the previous server has passed its connections; without one it stops the `starting` answers at once.
    """
    sockets.tell_loaded()
    if starting is not None:
        await asyncio.to_thread(starting.stop)
    if sockets.predecessor is None:
        return []
    arrival = asyncio.ensure_future(receive_connections(sockets.predecessor))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({arrival, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if arrival.done():
        return arrival.result()
    arrival.cancel()
    return None


async def receive_connections(channel: socket.socket) -> list[ReceivedConnection]:
    """Return all connections from the previous server, once it has passed the last one or has ended."""
    channel.setblocking(False)
    arrived: list[ReceivedConnection] = []
    while True:
        await _readable(channel)
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST_MESSAGE, _MOST_AT_ONCE + 1)
        if message in {b"", DONE}:
            channel.close()
            return arrived
        if message == _HELLO:
            continue
        *passed, content = descriptors
        with os.fdopen(content, "rb") as file:
            file.seek(0)
            for descriptor, size in zip(passed, json.loads(message), strict=True):
                arrived.append(ReceivedConnection(socket.socket(fileno=descriptor), file.read(size)))


def _detach(connections: Iterable[Connection]) -> list[tuple[int, bytes]]:
    """Detach connections; if no descriptor is left for one of them, end those before it: no server has them."""
    detached: list[tuple[int, bytes]] = []
    try:
        for each in connections:
            detached.append(each.detach())  # noqa: PERF401 - they are needed after an error as well
    except OSError:
        for descriptor, _ in detached:
            os.close(descriptor)
        raise
    return detached


async def _send(channel: socket.socket, passed: Sequence[tuple[int, bytes]]) -> None:
    """Send one message: the number of bytes read on each connection, the connections, and a file with these bytes."""
    descriptors = [descriptor for descriptor, _ in passed]
    try:
        descriptors.append(content := os.memfd_create("requests", os.MFD_CLOEXEC))
        with os.fdopen(content, "wb", closefd=False) as file:
            file.writelines(received for _, received in passed)
        message = json.dumps([len(received) for _, received in passed]).encode()
        await _writable(channel)
        socket.send_fds(channel, [message], descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _readable(channel: socket.socket) -> None:
    await _until(channel, asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)


async def _writable(channel: socket.socket) -> None:
    await _until(channel, asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)


async def _until(channel: socket.socket, add: Callable[..., None], remove: Callable[[socket.socket], bool]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrive() -> None:
        if not ready.done():
            ready.set_result(None)

    add(channel, arrive)
    try:
        await ready
    finally:
        remove(channel)
