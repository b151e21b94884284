"""The routes of one session: chats, texts, prompts as they are rendered, and the sequences so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive

from environments.sdk.errors import RequestRefused
from environments.sdk.session.answers import openai_document
from environments.sdk.session.requests import Route, SessionRequest, read_request
from environments.sdk.session.served import Served, result_of
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.streaming import AnswerStream, ChatChunks, TextChunks

MOST_BODY_BYTES = 32 << 20
SPLIT_HEADER = "X-Atropos-Split"
SENT_AS_GIVEN = ("full_text", "tokens", "masked_tokens", "logprobs", "policy_versions")


class SessionRoutes:
    """Answers what is asked of a session that `find` has let in; `temperature` replaces that of training requests."""

    def __init__(
        self,
        find: Callable[[Request], Served],
        *,
        model_name: Callable[[ManagedSession], str],
        temperature: float | None,
    ) -> None:
        self._find = find
        self._model_name = model_name
        self._temperature = temperature

    async def chat(self, request: Request) -> Response:
        return await self._complete("chat", request)

    async def text(self, request: Request) -> Response:
        return await self._complete("text", request)

    async def render(self, request: Request) -> Response:
        """The prompt that a chat would become; nothing is sampled."""
        session = self._find(request).session
        asked = read_request("chat", await read_object(request))
        messages, tools = asked.arguments["messages"], asked.arguments.get("tools")
        options = session.arguments(asked).get("chat_template_kwargs")
        text, tokens = session.render(messages, tools=tools, options=options)
        return JSONResponse({"prompt_text": text, "token_ids": tokens, "num_tokens": len(tokens)})

    async def nodes(self, request: Request) -> Response:
        found = [
            {**{key: getattr(node, key) for key in SENT_AS_GIVEN}, "finish_reason": node.finish_reason}
            for node in self._find(request).session.nodes
        ]
        return JSONResponse({"nodes": found})

    async def _complete(self, route: Route, request: Request) -> Response:
        served = self._find(request)
        session = served.session
        asked = read_request(route, await read_object(request))
        arguments = self._arguments(session, asked, request.headers.get(SPLIT_HEADER))
        call = session.chat_completion if route == "chat" else session.completion
        if asked.stream:
            form = ChatChunks if route == "chat" else TextChunks
            writer = form(model=self._model_name(session), include_usage=asked.include_usage)
            stream = AnswerStream(writer)
            stream.follow(served.start(call(**arguments, on_delta=stream.on_delta)))
            await _until(stream.begun, stream.task, request.receive)
            ended = BackgroundTask(stream.task.cancel)  # also where the client went before the first piece was sent
            return StreamingResponse(stream.events(), media_type="text/event-stream", background=ended)
        task = served.start(call(**arguments))
        await _until(None, task, request.receive)
        return JSONResponse({**openai_document(result_of(task)), "model": self._model_name(session)})

    def _arguments(self, session: ManagedSession, asked: SessionRequest, split: str | None) -> dict[str, Any]:
        """What the session is called with; a call for evaluation on the side leaves no sequence behind."""
        arguments = session.arguments(asked)
        if split not in {None, "train", "eval"}:
            raise RequestRefused(f"{SPLIT_HEADER} is {split!r:.40}; it may be train or eval", param=SPLIT_HEADER)
        if split == "eval":
            return {**arguments, "split": "eval", "keep": False}
        if self._temperature is not None:
            arguments["temperature"] = self._temperature
        return arguments


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body, up to a limit of size."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB")
        parts.append(part)
    try:
        return msgspec.json.decode(b"".join(parts) or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestRefused(f"the request is no JSON object: {error}") from None


async def _until(begun: asyncio.Event | None, task: asyncio.Task[Any], receive: Receive) -> None:
    """Wait until the answer has begun or is there; a client that goes away meanwhile ends its request.

    What fails before the answer has begun is raised here, while it can still have a status of its own.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    waited: set[asyncio.Future[Any]] = {task, gone}
    if begun is not None:
        waited.add(asyncio.ensure_future(begun.wait()))
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
    elif gone.done():
        task.cancel()
        raise ClientDisconnect


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
