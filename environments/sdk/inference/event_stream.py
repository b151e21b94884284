"""Streams of events: put together to samples, and handed on as they come. Our server's form, and a plain vLLM's."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from atropos_api.wire.groups import Span
from environments.sdk.errors import InferenceRefused, InferenceUnavailable
from environments.sdk.inference.generation import OnTokens, Sample


class Event(msgspec.Struct):
    """What is new of one sample; why it ended and under which versions comes with its last event."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    policy_versions: list[Span] | None = None


class PlainLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class PlainChoice(msgspec.Struct):
    """One sample of a plain vLLM, or what is new of it."""

    token_ids: list[int] | None = None
    logprobs: PlainLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0


class PlainReply(msgspec.Struct):
    """What vLLM's own completions route answers when token ids are asked for, whole or in events."""

    choices: list[PlainChoice] = []
    error: dict[str, Any] | None = None


class Problem(msgspec.Struct):
    """What the server says when it fails on the way."""

    detail: str = "no reason is told"
    status: int = 503


class SampleEvents:
    """Reads the body of a stream of `n` samples, in parts of any size."""

    def __init__(self, n: int, on_tokens: OnTokens, url: str) -> None:
        self.samples = [Sample([], [], "", []) for _ in range(n)]
        self._on_tokens = on_tokens
        self._url = url
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Take up a part of the body; raises what the server says went wrong."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            self._read(event)

    def finished(self) -> list[Sample]:
        """The samples, each of which must have ended."""
        if any(not sample.finish_reason for sample in self.samples):
            raise InferenceUnavailable(f"the answer of {self._url} broke off before its end")
        return self.samples

    def events_of(self, data: bytes) -> list[Event]:
        return [msgspec.json.decode(data, type=Event)]

    def _read(self, event: bytes) -> None:
        kind, data = b"", b""
        for line in event.splitlines():
            name, _, value = line.partition(b":")
            if name == b"event":
                kind = value.strip()
            elif name == b"data":
                data += value.strip()
        if kind == b"error":
            self._raise(data)
        elif data and data != b"[DONE]":
            try:
                for found in self.events_of(data):
                    self._take(found)
            except (msgspec.MsgspecError, IndexError) as error:
                raise InferenceRefused(f"{self._url} streamed something unexpected: {error}") from error

    def _take(self, event: Event) -> None:
        sample = self.samples[event.index]
        sample.tokens += event.token_ids
        sample.logprobs += event.logprobs
        if event.finish_reason == "abort":
            raise InferenceUnavailable(f"{self._url} was stopped before the answer's end")
        if event.finish_reason is not None:
            sample.finish_reason = event.finish_reason
            sample.versions = event.policy_versions or []
        if event.token_ids:
            self._on_tokens(event.index, event.token_ids, event.logprobs)

    def _raise(self, data: bytes) -> NoReturn:
        problem = msgspec.json.decode(data, type=Problem)
        kind = InferenceUnavailable if problem.status >= 500 else InferenceRefused
        raise kind(f"{self._url} failed on the way: {problem.status}: {problem.detail}")


class PlainEvents(SampleEvents):
    """The same of vLLM's own completions route, which tells no versions."""

    def events_of(self, data: bytes) -> list[Event]:
        reply = msgspec.json.decode(data, type=PlainReply)
        if reply.error is not None:
            raise InferenceUnavailable(f"{self._url} failed on the way: {reply.error.get('message', reply.error)}")
        return [
            Event(
                choice.index,
                choice.token_ids or [],
                [] if choice.logprobs is None else choice.logprobs.token_logprobs,
                choice.finish_reason,
            )
            for choice in reply.choices
        ]
