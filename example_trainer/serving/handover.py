"""Handing the clients' connections of one server over to the next, so that none of them notices.

A client keeps its connection and may send its next request at any moment: closing it, however politely, loses the
request that is on its way. So the connection itself is given to the process that takes over, as a file descriptor over
a Unix socket. One between two requests is given as it is; one whose request has no answer yet is given with the bytes
of that request, which the next server reads as if they had just come. An answer that has begun is finished here first.
The next server answers nobody before this one has given everything: a client that has seen a version never sees an
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from example_trainer.processes.ports import BEGUN_ANSWERS_SECONDS, DONE, ServerSockets
from example_trainer.serving.startup import StartingAnswers

logger = logging.getLogger(__name__)

Connections = set[Any]

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_CHANGING = ("/bridge/", "/lora/", "_lora_adapter")
_HELLO = b"hello"
_MOST_AT_ONCE = 60
_LONGEST_MESSAGE = 1 << 16
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Arrived:
    """A connection that another server has given, and what it had read of a request on it."""

    connection: socket.socket
    received: bytes


class Connection(HttpToolsProtocol):
    """One client's connection, which can be given to another process until an answer to its request has begun."""

    def __init__(self, *args: Any, received: bytes = b"", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_before = received
        self._received = bytearray()
        """The bytes that another server would have to read again; none of a request that it may not repeat."""
        self._requests: list[RequestResponseCycle] = []
        """Those that came since the connection was last idle: several, where a client does not wait for answers."""
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
    def can_ever_be_given(self) -> bool:
        """Not where it is encrypted: the keys are in this process."""
        return self.transport is not None and self.transport.get_extra_info("sslcontext") is None

    def can_be_given(self, *, mid_request: bool) -> bool:
        """True where another process can go on with it and nothing is lost; `mid_request`: by answering anew."""
        if not self.can_ever_be_given or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self._idle or (mid_request and self._repeatable)

    def give_away(self) -> tuple[int, bytes]:
        """A descriptor of the connection and what has been read of its requests, which end here without an answer."""
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
    """uvicorn that can take connections over and give them away; without signal handlers, the order is its owner's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.arrived: Sequence[Arrived] = ()
        """Connections to begin with."""

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
        """Accept no more connections; new ones wait for the server that takes over, if there is one."""
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
    """True where another server may answer a request as well as this one: it asks for tokens or reads, no more."""
    return scope["method"] in _READING or not any(part in scope["path"] for part in _CHANGING)


async def hand_over(
    connections: Connections, channel: socket.socket, *, drain_seconds: float, is_drained: Callable[[], bool]
) -> bool:
    """Give every connection to the server at the other end of the channel; False where nobody is there to take them.

    Running requests get `drain_seconds` to end here, or until `is_drained`; what has not been answered by then is
    answered there, and only answers that have begun keep this server for longer.
    """
    channel.setblocking(False)
    began = time.monotonic()
    try:
        channel.send(_HELLO)
        while ours := [each for each in connections if isinstance(each, Connection) and each.can_ever_be_given]:
            seconds = time.monotonic() - began
            if seconds > drain_seconds + BEGUN_ANSWERS_SECONDS:
                logger.warning("%d answers had not ended and are cut off", len(ours))
                break
            mid_request = seconds >= drain_seconds or is_drained()
            ready = [each for each in ours if each.can_be_given(mid_request=mid_request)]
            for first in range(0, len(ready), _MOST_AT_ONCE):
                await _send(channel, [each.give_away() for each in ready[first : first + _MOST_AT_ONCE]])
            await asyncio.sleep(_LOOK_SECONDS)
        await _writable(channel)
        channel.send(DONE)
    except ConnectionError:
        return False  # nobody is to follow
    except OSError as error:  # of descriptors this process, or all that are under way, may have just so many
        logger.warning("the clients' connections end here, for they cannot be given to the next server: %s", error)
        return False
    return True


async def take_over(
    sockets: ServerSockets, starting: StartingAnswers | None, stop: asyncio.Event
) -> list[Arrived] | None:
    """Wait until this server may answer; the connections that it begins with, or None where it is to stop instead.

    The server before gives its own and ends; where there is none, nobody is told any longer that this one starts.
    """
    sockets.tell_loaded()
    if starting is not None:
        await asyncio.to_thread(starting.stop)
    if sockets.predecessor is None:
        return []
    arrival, stopping = asyncio.ensure_future(arriving(sockets.predecessor)), asyncio.ensure_future(stop.wait())
    await asyncio.wait({arrival, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if arrival.done():
        return arrival.result()
    arrival.cancel()
    return None


async def arriving(channel: socket.socket) -> list[Arrived]:
    """All connections that the server before gives, once it has given the last one or has ended."""
    channel.setblocking(False)
    arrived: list[Arrived] = []
    while True:
        await _readable(channel)
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST_MESSAGE, _MOST_AT_ONCE + 1)
        if message in {b"", DONE}:
            channel.close()
            return arrived
        if message == _HELLO:
            continue
        *given, content = descriptors
        with os.fdopen(content, "rb") as file:
            file.seek(0)
            for descriptor, size in zip(given, json.loads(message), strict=True):
                arrived.append(Arrived(socket.socket(fileno=descriptor), file.read(size)))


async def _send(channel: socket.socket, given: Iterable[tuple[int, bytes]]) -> None:
    """One message: the sizes of what was read on each connection, the connections, and a file with all of it."""
    given = list(given)
    content = os.memfd_create("requests", os.MFD_CLOEXEC)
    descriptors = [descriptor for descriptor, _ in given]
    try:
        with os.fdopen(content, "wb", closefd=False) as file:
            file.writelines(received for _, received in given)
        message = json.dumps([len(received) for _, received in given]).encode()
        await _writable(channel)
        socket.send_fds(channel, [message], [*descriptors, content])
    finally:
        for descriptor in (*descriptors, content):
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
