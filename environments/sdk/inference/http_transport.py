"""HTTP to inference servers: request limits, timings, kept connections and the parsing of streamed samples.

`Limit` bounds the requests in flight, `Timings` keeps their durations and attempts, and `HttpTransport` is what a
`ServerChannel` sends through. It uses aiohttp, whose C parser costs a third of httpx's CPU per request: with a model on
the same cores that CPU time is lost to sampling. `SampleEvents` reads the event stream of the Atropos server and
`PlainEvents` that of a stock vLLM server: they assemble samples and pass tokens on as they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import anyio
import msgspec

from atropos_api.common.tracing import FIELD, current_span
from atropos_api.wire.groups import Span
from environments.sdk.errors import InferenceAborted, InferenceRefused
from environments.sdk.inference.sampling import OnTokens, Sample

if TYPE_CHECKING:
    import aiohttp


class Limit:
    """A limit of requests in flight, in order of arrival: it can change while requests wait, and a free place costs no
    task switch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = most
        self.used = 0
        self._waiting: deque[anyio.Event] = deque()

    @property
    def free(self) -> int:
        return max(0, self._allowed - self.used)

    def set_share(self, share: float) -> None:
        """Allow this share of the places, but at least one."""
        self._allowed = max(1, round(self._most * share))
        self._admit()

    async def __aenter__(self) -> None:
        if self.used < self._allowed and not self._waiting:
            self.used += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._release()
            else:
                self._waiting.remove(turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        self.used -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used < self._allowed:
            self.used += 1
            self._waiting.popleft().set()


class Timings:
    """Request timings: durations and attempts of the latest requests of one split (training or evaluation) are kept."""

    def __init__(self, window: int) -> None:
        self.seconds: deque[float] = deque(maxlen=window)
        self.attempts: deque[int] = deque(maxlen=window)

    def record(self, seconds: float, attempts: int) -> None:
        self.seconds.append(seconds)
        self.attempts.append(attempts)

    def summary(self, prefix: str) -> dict[str, float]:
        """Return mean, deviation and 99th percentile by the original Atropos' names; empty without requests."""
        count = len(self.seconds)
        if not count:
            return {}
        mean = sum(self.seconds) / count
        deviation = (sum((value - mean) ** 2 for value in self.seconds) / count) ** 0.5
        ordered = sorted(self.seconds)
        return {
            f"{prefix}request_time_avg": mean,
            f"{prefix}request_time_std": deviation,
            f"{prefix}request_time_99p": ordered[min(count - 1, int(count * 0.99))],
        }

    @property
    def mean_attempts(self) -> float:
        return sum(self.attempts) / len(self.attempts) if self.attempts else 0.0

    @property
    def retry_rate(self) -> float:
        return sum(count > 1 for count in self.attempts) / len(self.attempts) if self.attempts else 0.0


OnPiece = Callable[[bytes], None]
"""Callback that gets the parts of a successful answer's body as they arrive."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Transport(Protocol):
    """Interface that sends requests: `HttpTransport`, or an application called in process."""

    async def request(
        self, method: str, url: str, body: bytes | None, *, on_piece: OnPiece | None = None
    ) -> Response: ...

    async def aclose(self) -> None: ...


class HttpTransport:
    """HTTP transport for any number of servers: its connections are opened on the first request."""

    def __init__(self, headers: Mapping[str, str], *, timeout_seconds: float | None = None) -> None:
        self._headers = dict(headers)
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, body: bytes | None, *, on_piece: OnPiece | None = None) -> Response:
        """Send a request and return the whole answer; raise `OSError` if the connection fails or the time is over."""
        import aiohttp  # only a served environment needs it, `--help` does not

        session = self._session or self._open()
        try:
            try:
                return await _send(session, method, url, body, on_piece)
            except aiohttp.ServerDisconnectedError:
                # Closed while idle, or before it answered: our requests change nothing there, so repeating is safe.
                return await _send(session, method, url, body, on_piece)
        except OSError:
            raise
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{type(error).__name__} {error}".rstrip()) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        # No limit of connections here: `ServerChannel` limits training and evaluation requests.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
        )
        return self._session


async def _send(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, on_piece: OnPiece | None
) -> Response:
    traceparent = current_span().traceparent
    headers = None if traceparent is None else {FIELD: traceparent}
    async with session.request(method, url, data=body, headers=headers) as answer:
        if on_piece is None or not answer.ok:
            return Response(answer.status, await answer.read())
        parts = []
        async for part in answer.content.iter_any():
            parts.append(part)
            on_piece(part)
        return Response(answer.status, b"".join(parts))


class Event(msgspec.Struct):
    """One event of a sample's stream: its last event also has the finish reason and the policy versions."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    policy_versions: list[Span] | None = None
    sampling_masks: list[list[int]] | None = None


class PlainLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class PlainChoice(msgspec.Struct):
    """One sample of a stock vLLM server: in a stream it holds the new part only."""

    token_ids: list[int] | None = None
    logprobs: PlainLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0


class PlainReply(msgspec.Struct):
    """Answer of vLLM's own completions route: token ids were requested, and it came whole or as an event."""

    choices: list[PlainChoice] = []
    error: dict[str, Any] | None = None


class Problem(msgspec.Struct):
    """Error message: a server sends it in the middle of a stream."""

    detail: str = "no reason given"
    status: int = 503


class SampleEvents:
    """Parser of a stream of `n` samples: it takes the body in parts of any size."""

    def __init__(self, n: int, on_tokens: OnTokens, url: str) -> None:
        self.samples = [Sample([], [], "", []) for _ in range(n)]
        self._on_tokens = on_tokens
        self._url = url
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Parse a part of the body; raise the error that the server reports in it."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            self._read(event)

    def finished(self) -> list[Sample]:
        """Return the samples; raise if one of them is incomplete."""
        if any(not sample.finish_reason for sample in self.samples):
            raise InferenceAborted(f"the answer of {self._url} ended before it was complete")
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
                raise InferenceRefused(f"{self._url} sent an unexpected event: {error}") from error

    def _take(self, event: Event) -> None:
        sample = self.samples[event.index]
        sample.tokens += event.token_ids
        sample.logprobs += event.logprobs
        if event.sampling_masks is not None:
            sample.sampling_masks = (sample.sampling_masks or []) + event.sampling_masks
        if event.finish_reason == "abort":
            raise InferenceAborted(f"{self._url} aborted its answer")
        if event.finish_reason is not None:
            sample.finish_reason = event.finish_reason
            sample.versions = event.policy_versions or []
        if event.token_ids:
            self._on_tokens(event.index, event.token_ids, event.logprobs)

    def _raise(self, data: bytes) -> NoReturn:
        problem = msgspec.json.decode(data, type=Problem)
        kind = InferenceAborted if problem.status >= 500 else InferenceRefused
        raise kind(f"{self._url} failed during its answer: {problem.status}: {problem.detail}")


class PlainEvents(SampleEvents):
    """Parser of a stream of vLLM's own completions route: it has no policy versions."""

    def events_of(self, data: bytes) -> list[Event]:
        reply = msgspec.json.decode(data, type=PlainReply)
        if reply.error is not None:
            raise InferenceAborted(f"{self._url} failed during its answer: {reply.error.get('message', reply.error)}")
        return [
            Event(
                choice.index,
                choice.token_ids or [],
                [] if choice.logprobs is None else choice.logprobs.token_logprobs,
                choice.finish_reason,
            )
            for choice in reply.choices
        ]
