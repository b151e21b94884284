"""Answers for those who ask a server that is still loading: 503 `starting`, and when to ask again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from example_trainer.serving import problems

_LONGEST_REQUEST_BYTES = 64 << 20
_REQUEST_SECONDS = 5.0
_CLOSING_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class StartingAnswers:
    """Answers every request on a listening socket from a thread, while imports and weights keep the main one busy."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening.dup()
        # Made here: the thread that answers may import nothing, for the engine may be forked out of this process.
        self._answers = {with_body: _response(with_body=with_body) for with_body in (True, False)}
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._running = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="starting-answers", daemon=True)
        self._thread.start()
        self._running.wait()

    def stop(self) -> None:
        """Accept nothing more; what was accepted has been answered when this returns."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._listening.setblocking(False)
        stopping = asyncio.ensure_future(self._stop.wait())
        answering: set[asyncio.Task[None]] = set()
        self._running.set()
        while not stopping.done():
            accepting = asyncio.ensure_future(self._loop.sock_accept(self._listening))
            await asyncio.wait({accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                break
            try:
                connection, _ = accepting.result()
            except OSError:  # no descriptor is left for it, or its client has gone
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = asyncio.ensure_future(self._answer(connection))
            answering.add(task)
            task.add_done_callback(answering.discard)
        self._listening.close()
        if answering:
            await asyncio.wait(answering, timeout=_REQUEST_SECONDS)

    async def _answer(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                await _skip(reader, _body_bytes(head))  # or the client might find its connection reset while it sends
                writer.write(self._answers[not head.startswith(b"HEAD ")])
                await writer.drain()
                # Said with a shutdown: an engine that is being forked at this moment holds a copy of the connection.
                connection.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await reader.read()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # who does not send a request gets no answer
        finally:
            writer.close()


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        piece = await reader.read(min(size, 1 << 16))
        if not piece:
            return
        size -= len(piece)


def _body_bytes(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            with contextlib.suppress(ValueError):
                return min(int(value), _LONGEST_REQUEST_BYTES)
    return 0


def _response(*, with_body: bool) -> bytes:
    answer = problems.starting().response()
    headers = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n" + headers + b"\r\n" + (bytes(answer.body) if with_body else b"")
