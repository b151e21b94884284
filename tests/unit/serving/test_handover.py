"""Each kind of connection passes from one server to the next without loss, byte by byte, in one process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import uvicorn

from example_trainer.processes.ports import HandoverChannel, listen
from example_trainer.serving import handover, problems
from example_trainer.serving.handover import Connection, HandoverServer, hand_over, receive_connections
from example_trainer.serving.testing import VersionServer

pytestmark = pytest.mark.anyio


class Served:
    """A server in this process that records all its requests."""

    def __init__(self, version):
        self.app, self.asked = VersionServer(version, answer_seconds=0.0), []
        config = uvicorn.Config(self._ask, log_level="error", lifespan="off", interface="asgi3")
        config.load()
        self.server = HandoverServer(config)

    async def _ask(self, scope, receive, send):
        self.asked.append(scope["path"])
        await self.app(scope, receive, send)

    @asynccontextmanager
    async def running(self, listening):
        serving = asyncio.ensure_future(self.server.serve(sockets=[listening]))
        while not self.server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.001)
        try:
            yield self
        finally:
            self.app.gate.refuse(problems.stopping())
            self.server.should_exit = True
            await serving

    async def hand_over(self, sender, *, drain_seconds=0.0):
        self.server.stop_accepting()
        self.app.gate.close()
        return await hand_over(
            self.server.server_state.connections,
            sender,
            drain_seconds=drain_seconds,
            is_drained=lambda: self.app.gate.inside == 0,
        )


class Replacement:
    """A server of version 1, a client's connection to it, and a server of version 2 that takes over."""

    def __init__(self):
        self.old, self.new, self.channel = Served(1), Served(2), HandoverChannel()

    async def connect(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._stack.push_async_callback(close, writer)
        return reader, writer

    async def replace(self, **options):
        """Replace the server; return when the new one works and the old one's port and requests are gone."""
        arrival = asyncio.ensure_future(receive_connections(self.channel.receiver))
        assert await self.old.hand_over(self.channel.sender, **options)
        self.new.server.arrived = await arrival
        await self._stack.enter_async_context(self.new.running(self._second))

    async def __aenter__(self):
        self._stack = AsyncExitStack()
        first = self._stack.enter_context(listen("127.0.0.1", 0))
        self._second, self.port = self._stack.enter_context(first.dup()), first.getsockname()[1]
        self._stack.callback(self.channel.close)
        await self._stack.enter_async_context(self.old.running(first))
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()


async def close(writer):
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def request(path="/generate", **body):
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content)) + content


async def answer(reader):
    """Return the version of the next answer; a stream's pieces must agree."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"chunked" in head:
        lines = [line for line in (await reader.readuntil(b"0\r\n\r\n")).split(b"\r\n") if line.startswith(b"{")]
    else:
        lines = [await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))]
    (version,) = {json.loads(line)["policy_version"] for line in lines}
    return version


async def settle():
    await asyncio.sleep(0.05)


LONG = request(text="x" * 300_000)
OFFER = request(a="b").replace(b"Host: x", b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c")
"""A request of a Java client, which offers HTTP/2: its body was lost."""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param([], [request()], [2], id="between two requests"),
        pytest.param([request()], [], [2], id="one not answered yet"),
        pytest.param([b"P"], [request()[1:]], [2], id="a byte of a request"),
        pytest.param([request()[:30]], [request()[30:]], [2], id="half a head"),
        pytest.param([request(a="b")[:-4]], [request(a="b")[-4:]], [2], id="half a body"),
        pytest.param([request() + request()], [], [2, 2], id="two that did not wait for each other"),
        pytest.param([OFFER[:-4]], [OFFER[-4:]], [2], id="half a body of one that offers HTTP/2"),
        pytest.param([OFFER + request()], [], [2, 2], id="one that offers HTTP/2 and another"),
        pytest.param([request() + request()[:30]], [request()[30:]], [2, 2], id="one and half another"),
    ],
)
async def test_r42_whatever_has_no_answer_yet_is_answered_by_the_next_server_once(before, after, expected):
    async with Replacement() as both:
        reader, writer = await both.connect()
        both.old.app.gate.close()  # so that nothing is answered before the handover
        for data in before:
            writer.write(data)
        await settle()
        await both.replace()
        for data in after:
            writer.write(data)
        assert [await answer(reader) for _ in expected] == expected
        assert both.new.asked == ["/generate"] * len(expected)
        writer.write(request())
        assert await answer(reader) == 2


async def test_an_answer_that_has_begun_is_finished_by_the_server_that_began_it_and_the_next_one_is_the_others():
    async with Replacement() as both:
        reader, writer = await both.connect()
        writer.write(request(stream=True, seconds=0.3))
        await settle()
        await both.replace()
        writer.write(request())
        assert [await answer(reader), await answer(reader)] == [1, 2]


async def test_a_request_that_came_before_the_last_answer_is_not_lost_and_that_answer_not_given_twice():
    async with Replacement() as both:
        reader, writer = await both.connect()
        writer.write(request("/bridge/info").replace(b"POST", b"GET") + request(seconds=0.3))
        assert await answer(reader) == 1
        await both.replace()
        writer.write(request())
        assert [await answer(reader), await answer(reader)] == [1, 2]
        assert both.new.asked == ["/generate"]


async def test_a_request_that_was_answered_before_its_body_had_come_is_not_answered_again():
    async with Replacement() as both:
        reader, writer = await both.connect()
        early = request("/bridge/info", text="x" * 100).replace(b"POST", b"GET")
        writer.write(early[:-50])
        assert await answer(reader) == 1
        replacing = asyncio.ensure_future(both.replace())
        await settle()
        assert not replacing.done(), "no other process may read the rest"
        writer.write(early[-50:])
        await replacing
        writer.write(request())
        assert await answer(reader) == 2
        assert both.new.asked == ["/generate"]


async def test_a_call_that_changes_the_server_is_not_repeated_and_no_copy_of_its_body_is_kept():
    async with Replacement() as both:
        reader, writer = await both.connect()
        writer.write(request("/lora/upload", text="x" * 300_000, seconds=0.2))
        await settle()
        (connection,) = both.old.server.server_state.connections
        assert not connection._received
        await both.replace()
        assert await answer(reader) == 1
        assert both.new.asked == []


async def test_a_request_in_many_pieces_arrives_whole_and_is_forgotten_once_it_is_answered():
    async with Replacement() as both:
        reader, writer = await both.connect()
        writer.write(LONG)
        assert await answer(reader) == 1
        (connection,) = both.old.server.server_state.connections
        assert not connection._received
        writer.write(LONG[:200_000])
        await settle()
        await both.replace()
        writer.write(LONG[200_000:])
        assert await answer(reader) == 2


async def test_a_client_that_leaves_meanwhile_does_not_disturb_the_others():
    async with Replacement() as both:
        leaving, (reader, writer) = socket.create_connection(("127.0.0.1", both.port)), await both.connect()
        both.old.app.gate.close()
        leaving.sendall(request())
        writer.write(request())
        await settle()
        assert await both.old.hand_over(both.channel.sender)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.close()  # by a reset
        await both.replace()
        assert await answer(reader) == 2


async def test_what_a_server_that_is_killed_had_given_is_answered_by_the_next():
    async with Replacement() as both:
        reader, writer = await both.connect()
        both.old.app.gate.close()
        writer.write(request())
        await settle()
        (connection,) = both.old.server.server_state.connections
        await handover._send(both.channel.sender, [connection.detach()])
        both.channel.end()  # the program that started it says so, after a SIGKILL
        both.new.server.arrived = await receive_connections(both.channel.receiver)
        async with both.new.running(both._second.dup()):
            assert await answer(reader) == 2


async def test_a_server_without_a_descriptor_to_spare_says_so_and_ends_its_connections_itself(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    async with Replacement() as both:
        reader, writer = await both.connect()
        writer.write(request())
        assert await answer(reader) == 1
        monkeypatch.setattr(socket, "send_fds", refuse)
        assert not await both.old.hand_over(both.channel.sender)
        assert "cannot be handed to the next server" in caplog.text
        assert await reader.read() == b""


@pytest.mark.parametrize(("call", "at"), [("dup", 2), ("memfd_create", 1)])
async def test_connections_that_were_to_be_given_end_although_no_descriptor_is_left(monkeypatch, caplog, call, at):
    works, calls = getattr(os, call), []

    def refuse(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return works(*arguments)

    async with Replacement() as both:
        clients = [await both.connect() for _ in range(2)]
        for reader, writer in clients:
            writer.write(request())
            assert await answer(reader) == 1
        monkeypatch.setattr(os, call, refuse)
        assert not await both.old.hand_over(both.channel.sender)
        assert "cannot be handed to the next server: [Errno 24] Too many open files" in caplog.text
        readings = {asyncio.ensure_future(reader.read()) for reader, _ in clients}
        ended, _ = await asyncio.wait(readings, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result() for each in ended} == {b""}
    await asyncio.wait(readings)


async def test_a_client_that_leaves_while_others_are_given_keeps_none_of_them_back(monkeypatch):
    send = handover._send

    async def send_while_the_others_leave(channel, passed):
        await send(channel, passed)
        for each in both.old.server.server_state.connections:
            each.transport.abort()
        await settle()

    monkeypatch.setattr(handover, "_MOST_AT_ONCE", 1)
    monkeypatch.setattr(handover, "_send", send_while_the_others_leave)
    async with Replacement() as both:
        for _ in range(2):
            reader, writer = await both.connect()
            writer.write(request())
            assert await answer(reader) == 1
        arrival = asyncio.ensure_future(receive_connections(both.channel.receiver))
        assert await both.old.hand_over(both.channel.sender)
        (given,) = await asyncio.wait_for(arrival, 10)
        given.connection.close()


async def test_encrypted_connections_are_neither_given_nor_waited_for(monkeypatch):
    async with Replacement() as both:
        monkeypatch.setattr(Connection, "can_ever_be_passed", False)
        reader, writer = await both.connect()
        writer.write(request())
        assert await answer(reader) == 1
        await asyncio.wait_for(both.old.hand_over(both.channel.sender), 1)
        assert await receive_connections(both.channel.receiver) == []
