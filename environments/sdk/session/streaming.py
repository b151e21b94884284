"""Answers of sessions as server-sent events: OpenAI's chunks, one for each piece of an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from environments.sdk.session.answers import (
    ChatCompletion,
    Completion,
    chat_logprobs,
    openai_finish_reason,
    text_logprobs,
)
from environments.sdk.session.deltas import Delta
from environments.sdk.session.problems import problem_of
from environments.sdk.session.served import result_of

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, kw_only=True)
class _Chunks:
    """What the chunks of one answer have in common."""

    model: str
    include_usage: bool
    kind: str = ""
    prefix: str = ""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def usage(self, answer: ChatCompletion | Completion) -> dict[str, Any]:
        """The chunk after the last, which has no choice."""
        return {**self._chunk([]), "usage": answer.model_dump()["usage"]}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk


@dataclass(slots=True, kw_only=True)
class ChatChunks(_Chunks):
    """Chunks of a chat: the role first, then text, then calls, then why it ended."""

    kind: str = "chat.completion.chunk"
    prefix: str = "chatcmpl"
    _begun: set[int] = field(default_factory=set)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
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
    """Chunks of a text completion."""

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
    """Events of one answer: `on_delta` takes the pieces, `events` gives them on as they come."""

    task: asyncio.Task[Any]

    def __init__(self, writer: ChatChunks | TextChunks) -> None:
        self._writer = writer
        self._pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
        self.begun = asyncio.Event()
        """Set with the first piece."""

    def follow(self, task: asyncio.Task[Any]) -> None:
        """End when the task that makes the answer does."""
        self.task = task
        task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    def on_delta(self, delta: Delta) -> None:
        self._pieces.put_nowait(delta)
        self.begun.set()

    async def events(self) -> AsyncIterator[bytes]:
        """The pieces, then the usage if it was asked for; a task that fails ends the stream with its problem."""
        try:
            while (delta := await self._pieces.get()) is not None:
                for chunk in self._writer.chunks(delta):
                    yield _event(chunk)
            try:
                answer = result_of(self.task)
            except Exception as error:  # noqa: BLE001 - too late for a status: the client reads of it in the stream
                yield _event(problem_of(error)[1])
                return
            if self._writer.include_usage:
                yield _event(self._writer.usage(answer))
            yield DONE
        finally:
            self.task.cancel()  # where the client has gone


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
