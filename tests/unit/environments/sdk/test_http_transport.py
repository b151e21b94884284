"""The HTTP transport against real sockets."""

import anyio
import pytest

from environments.sdk.inference.http_transport import HttpTransport, Response
from environments.sdk.testing import FakeInference, served

pytestmark = pytest.mark.anyio


async def serve_raw(task_status, handler):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
        await listener.serve(handler)


class RawServer:
    """Answers each request on a connection with the next of its scripted byte strings; None closes instead."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.connections = 0

    async def __call__(self, stream):
        self.connections += 1
        async with stream:
            while self.answers:
                try:
                    await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
                answer = self.answers.pop(0)
                if answer is None:
                    return
                for part in answer:
                    await stream.send(part)
                    await anyio.sleep(0.005)


async def run_against(server, use):
    async with anyio.create_task_group() as group:
        port = await group.start(lambda task_status: serve_raw(task_status, server))
        client = HttpTransport({"Accept": "application/json"})
        try:
            await use(client, f"http://127.0.0.1:{port}/generate")
        finally:
            await client.aclose()
            group.cancel_scope.cancel()


async def test_answers_in_pieces_and_in_chunks_are_put_together():
    whole = [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 4\r\n\r\nab", b"cd"]
    chunked = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"]
    server = RawServer(whole, chunked)

    async def use(client, url):
        assert await client.request("POST", url, b"{}") == Response(200, b"abcd")
        assert await client.request("POST", url, b"{}") == Response(200, b"abcd")
        assert server.connections == 1

    await run_against(server, use)


async def test_a_connection_closed_while_idle_is_replaced_without_an_error():
    server = RawServer([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], None)

    async def use(client, url):
        await client.request("GET", url, None)
        server.answers.append([b"HTTP/1.1 503 X\r\nContent-Length: 1\r\n\r\n!"])
        assert await client.request("GET", url, None) == Response(503, b"!")
        assert server.connections == 2

    await run_against(server, use)


async def test_an_answer_that_breaks_off_is_an_error():
    server = RawServer([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nab"])

    async def use(client, url):
        with pytest.raises(OSError):
            await client.request("GET", url, None)

    await run_against(server, use)


async def test_an_answer_that_is_not_http_is_an_error():
    async def use(client, url):
        with pytest.raises(OSError):
            await client.request("GET", url, None)

    await run_against(RawServer([b"SSH-2.0-OpenSSH\r\n\r\n"]), use)


async def test_a_server_that_asks_for_it_gets_a_new_connection():
    closing = [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"]
    server = RawServer(closing, closing)

    async def use(client, url):
        await client.request("GET", url, None)
        await client.request("GET", url, None)
        assert server.connections == 2

    await run_against(server, use)


async def test_many_requests_at_once_reach_a_real_server():
    fake = FakeInference(lambda prompt, index: [7, 1], end=1)
    with served(fake) as url:
        client = HttpTransport({"Content-Type": "application/json"})
        answers = []

        async def ask():
            body = b'{"prompt": {"prompt_token_ids": [5]}, "n": 1, "compact": true}'
            answers.append(await client.request("POST", f"{url}/generate", body))

        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(ask)
        await client.aclose()
    assert {answer.status for answer in answers} == {200}
    assert len(answers) == 40
