"""The HTTP routes of one session: chats, texts, rendered prompts, and the sequences so far.

A streamed answer is sent as server-sent events with OpenAI's chunks, one for each piece of the answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive

from environments.sdk.errors import RequestRefused
from environments.sdk.session.openai_requests import Route, SessionRequest, read_request
from environments.sdk.session.openai_types import (
    ChatCompletion,
    Completion,
    chat_logprobs,
    openai_document,
    openai_finish_reason,
    text_logprobs,
)
from environments.sdk.session.served import ServedSession, problem_of, result_of
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.turns import Delta

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, kw_only=True)
class _Chunks:
    """Base class of chunk writers: it holds the fields that all chunks of one answer share."""

    model: str
    include_usage: bool
    kind: str = ""
    prefix: str = ""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def usage(self, answer: ChatCompletion | Completion) -> dict[str, Any]:
        """Return the usage chunk: it follows the last piece and has no choice."""
        return {**self._chunk([]), "usage": answer.model_dump()["usage"]}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk


@dataclass(slots=True, kw_only=True)
class ChatChunks(_Chunks):
    """Writer of a chat's chunks: it writes the role first, then text, then tool calls, then the finish reason."""

    kind: str = "chat.completion.chunk"
    prefix: str = "chatcmpl"
    _started: set[int] = field(default_factory=set)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            pieces.append({"role": "assistant", "content": ""})
        if delta.text or delta.logprobs:
            pieces.append({"content": delta.text})
        pieces += [{"tool_calls": [part]} for part in delta.tool_calls]
        if delta.finish_reason is not None:
            pieces.append({})
        found: list[dict[str, Any]] = [
            {"index": delta.index, "delta": piece, "logprobs": None, "finish_reason": None} for piece in pieces
        ]
        if delta.logprobs:
            found[-1]["logprobs"] = chat_logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            found[-1]["finish_reason"] = openai_finish_reason(delta.finish_reason)
        return [self._chunk([choice]) for choice in found]


@dataclass(slots=True, kw_only=True)
class TextChunks(_Chunks):
    """Writer of a text completion's chunks: it tracks each choice's text offset."""

    kind: str = "text_completion"
    prefix: str = "cmpl"
    _offsets: dict[int, int] = field(default_factory=dict)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = None
        if delta.logprobs:
            offset = self._offsets.get(delta.index, 0)
            logprobs = text_logprobs(delta.logprobs, offset=offset)
            self._offsets[delta.index] = offset + sum(len(token.text) for token in delta.logprobs)
        reason = None if delta.finish_reason is None else openai_finish_reason(delta.finish_reason)
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}
        return [self._chunk([choice])]


class AnswerStream:
    """Stream of one answer's events: `on_delta` takes the pieces, `events` yields them as they come."""

    task: asyncio.Task[Any]

    def __init__(self, writer: ChatChunks | TextChunks) -> None:
        self._writer = writer
        self._pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
        self.started = asyncio.Event()
        """An event set with the first piece."""

    def follow(self, task: asyncio.Task[Any]) -> None:
        """End the stream when the task that makes the answer ends."""
        self.task = task
        task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    async def end(self) -> None:
        """Stop the sampling: a coroutine, because Starlette calls plain functions in a thread, and no other thread may
        cancel a task.
        """
        self.task.cancel()

    def on_delta(self, delta: Delta) -> None:
        self._pieces.put_nowait(delta)
        self.started.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the pieces, then the usage if it was requested; a task that fails ends the stream with its error."""
        try:
            while (delta := await self._pieces.get()) is not None:
                for chunk in self._writer.chunks(delta):
                    yield _event(chunk)
            try:
                answer = result_of(self.task)
            except Exception as error:  # noqa: BLE001 - too late for an HTTP status, so the stream reports it
                yield _event(problem_of(error)[1])
                return
            if self._writer.include_usage:
                yield _event(self._writer.usage(answer))
            yield DONE
        finally:
            self.task.cancel()  # stops the sampling if the client has disconnected


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


MOST_BODY_BYTES = 32 << 20
SPLIT_HEADER = "X-Atropos-Split"
NODE_FIELDS = ("full_text", "tokens", "masked_tokens", "logprobs", "policy_versions", "sampling_masks")


@dataclass(eq=False)
class SessionRoutes:
    """Handlers of a session's routes: `find` returns the session of an authorised request.

    `temperature` replaces the one of training requests.
    """

    find: Callable[[Request], ServedSession]
    _: KW_ONLY
    model_name: Callable[[ManagedSession], str]
    temperature: float | None

    async def chat(self, request: Request) -> Response:
        return await self._complete("chat", request)

    async def text(self, request: Request) -> Response:
        return await self._complete("text", request)

    async def render(self, request: Request) -> Response:
        """Answer with the prompt that a chat would become; nothing is sampled."""
        session = self.find(request).session
        asked = read_request("chat", await read_object(request))
        messages, tools = asked.arguments["messages"], asked.arguments.get("tools")
        options = session.arguments(asked).get("chat_template_kwargs")
        text, tokens = session.render(messages, tools=tools, options=options)
        return JSONResponse({"prompt_text": text, "token_ids": tokens, "num_tokens": len(tokens)})

    async def nodes(self, request: Request) -> Response:
        found = [
            {**{key: getattr(node, key) for key in NODE_FIELDS}, "finish_reason": node.finish_reason}
            for node in self.find(request).session.nodes
        ]
        return JSONResponse({"nodes": found})

    async def _complete(self, route: Route, request: Request) -> Response:
        served = self.find(request)
        session = served.session
        asked = read_request(route, await read_object(request))
        arguments = self._arguments(session, asked, request.headers.get(SPLIT_HEADER))
        call = session.chat_completion if route == "chat" else session.completion
        if asked.stream:
            form = ChatChunks if route == "chat" else TextChunks
            writer = form(model=self.model_name(session), include_usage=asked.include_usage)
            stream = AnswerStream(writer)
            stream.follow(served.start(call(**arguments, on_delta=stream.on_delta)))
            await _wait_until_started(stream.started, stream.task, request.receive)
            ended = BackgroundTask(stream.end)  # also if the client disconnects before the first piece is sent
            return StreamingResponse(stream.events(), media_type="text/event-stream", background=ended)
        task = served.start(call(**arguments))
        await _wait_until_started(None, task, request.receive)
        return JSONResponse({**openai_document(result_of(task)), "model": self.model_name(session)})

    def _arguments(self, session: ManagedSession, asked: SessionRequest, split: str | None) -> dict[str, Any]:
        """Return the session's arguments; a call marked as evaluation adds no sequence to the session."""
        arguments = session.arguments(asked)
        if split not in {None, "train", "eval"}:
            raise RequestRefused(f"{SPLIT_HEADER} is {split!r:.40}; it may be train or eval", param=SPLIT_HEADER)
        if split == "eval":
            return {**arguments, "split": "eval", "keep": False}
        if self.temperature is not None:
            arguments["temperature"] = self.temperature
        return arguments


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body, up to a size limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB")
        parts.append(part)
    try:
        return msgspec.json.decode(b"".join(parts) or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the request is not a JSON object: {error}") from None


async def _wait_until_started(started: asyncio.Event | None, task: asyncio.Task[Any], receive: Receive) -> None:
    """Wait until the answer has started or is complete; if the client disconnects meanwhile, its request is cancelled.

    An error before the answer has started is raised here, while it can still have an HTTP status of its own.
    """
    disconnected = asyncio.ensure_future(_disconnected(receive))
    waited: set[asyncio.Future[Any]] = {task, disconnected}
    if started is not None:
        waited.add(asyncio.ensure_future(started.wait()))
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        task.cancel()
        raise
    finally:
        for other in waited - {task}:
            other.cancel()
    if task.done():
        result_of(task)
    elif disconnected.done():
        task.cancel()
        raise ClientDisconnect


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
