"""The events in which our server streams an answer: put together to samples, and handed on as they come."""

from __future__ import annotations

from typing import NoReturn

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
        self._events = msgspec.json.Decoder(Event)

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
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            event = self._events.decode(data)
            sample = self.samples[event.index]
        except (msgspec.MsgspecError, IndexError) as error:
            raise InferenceRefused(f"{self._url} streamed something unexpected: {error}") from error
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
