"""`POST /generate`: tokens in, tokens out, with the logprob and the policy version of each.

The handler is bare ASGI: at some hundred requests a second, on cores shared with the decoding itself, a web framework's
routing and models would cost tokens. `GenerateRequest` is the body, and `sampling_params` converts it to vLLM's
sampling parameters.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from atropos_api.common.cliconfig import nearest
from example_trainer.serving import problems
from example_trainer.serving.adapters import Adapter, Adapters
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.engine import LARGEST_SEED, EngineAdapter
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem, engine_problems
from example_trainer.serving.responses import Replies, all_finite

_LARGEST_BIAS = 100
_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "sampling_mask_limit")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`(?: - at `(?P<where>[^`]*)`)?")


class TokenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt given as tokens, so that it is not tokenised a second time."""

    prompt_token_ids: list[int]


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /generate`; sampling fields have vLLM's names, meanings and defaults."""

    prompt: str | list[int] | TokenPrompt
    stream: bool = False
    compact: bool = False
    model: str | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: bool | int | None = 0
    prompt_logprobs: int | None = None
    sampling_mask_limit: int = 0
    """Most tokens of a sampling mask, the tokens that a draw could choose from; 0: the answer has no masks."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def wants_text(self) -> bool:
        """True if the answer has text; the compact format has it only on request."""
        return self.detokenize if self.detokenize is not None else not self.compact

    @property
    def detokenized_by_engine(self) -> bool:
        """True if text is made token by token, which only stop strings or a stream need."""
        return bool(self.stop) or (self.stream and self.wants_text)

    @property
    def limits_sampling(self) -> bool:
        """True if it forbids tokens, and so may leave none to sample."""
        return bool(self.allowed_token_ids or self.bad_words or self.logit_bias or self.min_tokens) or (
            self.repetition_penalty != 1
        )

    @property
    def logprob_count(self) -> int | None:
        """Number of alternatives: `true` means only the sampled token's logprob, like 0; `false` none, like null."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return self.logprobs

    @property
    def requested_logprobs(self) -> int | None:
        """Number of alternatives that the engine is asked for: a mask is whole if it gave one less at most."""
        return self.sampling_mask_limit + 1 if self.sampling_mask_limit else self.logprob_count


_OUR_FIELDS = frozenset({"prompt", "stream", "compact", "model", "logprobs", "detokenize", "sampling_mask_limit"})
_SAMPLING_FIELDS = tuple(name for name in GenerateRequest.__struct_fields__ if name not in _OUR_FIELDS)


class RequestParser:
    """Reads bodies of `/generate`; mistakes are answered with 422, the field and the value."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(GenerateRequest)

    def parse(self, body: bytes) -> GenerateRequest:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise Problem(422, "bad-request", _explain(str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(400, "bad-json", f"the body is not JSON: {error}") from None


def sampling_params(request: GenerateRequest) -> Any:
    """Return vLLM's sampling parameters."""
    _check_bias(request.logit_bias)
    _check_integers(request)
    _check_mask_limit(request)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    fields = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    try:
        return SamplingParams(
            **fields,
            logprobs=request.requested_logprobs,
            flat_logprobs=True,
            detokenize=request.detokenized_by_engine,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        raise Problem(422, "bad-request", " ".join(str(error).split())) from error


def _check_bias(logit_bias: dict[int, float] | None) -> None:
    """Refuse biases beyond OpenAI's limits: a logit may overflow, and then the logprobs do, too."""
    for token, bias in (logit_bias or {}).items():
        if abs(bias) > _LARGEST_BIAS:
            limits = f"between -{_LARGEST_BIAS} and {_LARGEST_BIAS}"
            raise Problem(422, "bad-request", f"logit_bias: {bias} for token {token} is not {limits}")


def _check_integers(request: GenerateRequest) -> None:
    """Refuse integers beyond 64 bits, which the engine cannot be sent, and the seed -1, which vLLM takes for none."""
    for name in _INTEGERS:
        value = getattr(request, name)
        if value is not None and not -(2**63) <= value < 2**63:
            raise Problem(422, "bad-request", f"{name}: {value} has more than 64 bits")
    seed = request.seed
    if seed is not None and not 0 <= seed <= LARGEST_SEED - max(0, request.n - 1):
        limit = f"{LARGEST_SEED}" if request.n <= 1 else f"{LARGEST_SEED} less the other {request.n - 1} outputs"
        raise Problem(422, "bad-request", f"seed: {seed} is not between 0 and {limit}")


def _check_mask_limit(request: GenerateRequest) -> None:
    """Refuse a limit below 0, and alternatives beside masks, which are read from the engine's alternatives."""
    limit = request.sampling_mask_limit
    if limit < 0:
        raise Problem(422, "bad-request", f"sampling_mask_limit: {limit} is below 0")
    if limit and request.logprob_count:
        detail = f"sampling_mask_limit: it needs logprobs 0, and {request.logprobs} were asked for"
        raise Problem(422, "bad-request", detail)


def _explain(message: str) -> str:
    found = _UNKNOWN_FIELD.search(message)
    if found is None:
        return message.replace(" - at `$.", " at `")
    known = TokenPrompt.__struct_fields__ if found["where"] == "$.prompt" else GenerateRequest.__struct_fields__
    return f"unknown field {found['name']!r}{nearest(found['name'], known)}"


_MAX_BODY_BYTES = 32 << 20
_LONG_TEXT = 4096  # characters; tokenising more in the event loop would delay all other requests
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One admitted request, with the send function and disconnect signal of its client."""

    request: GenerateRequest
    prompt: list[int]
    params: Any
    disconnected: asyncio.Future[None]
    leave: Callable[[], None]
    send: Send
    publishes_keeping_kv: int
    adapter: Adapter | None
    trace_headers: dict[str, str] | None


class GenerateHandler:
    """Answers `/generate`; everything shared is passed to the constructor."""

    def __init__(
        self,
        engine: EngineAdapter,
        fence: Fence,
        gate: AdmissionGate,
        adapters: Adapters,
        replies: Replies,
        tokenizer: Any,
        check: Callable[[Iterable[tuple[bytes, bytes]]], None] = lambda _: None,
    ) -> None:
        """Keep the arguments; `check` raises the refusal of a request with these headers, if there is one."""
        self._check = check
        self._engine = engine
        self._fence = fence
        self._gate = gate
        self._adapters = adapters
        self._replies = replies
        self._tokenizer = tokenizer
        self._parser = RequestParser()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = self._parser.parse(await read_body(receive))
            prompt = await self._tokens_of(request)
            params = sampling_params(request)
            self._adapters.named(request.model)
            await self._gate.enter(partial(self._check, scope["headers"]))
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        leave = _once(self._gate.leave)
        try:
            adapter = self._adapters.named(request.model)  # a later activation does not change it
            publishes_keeping_kv = self._fence.publishes_keeping_kv
            await self._run_exchange(
                Exchange(
                    request,
                    prompt,
                    params,
                    disconnected,
                    leave,
                    send,
                    publishes_keeping_kv,
                    adapter,
                    trace_headers_of(scope) if self._engine.is_traced else None,
                )
            )
        except Problem as problem:
            await problem.response()(scope, receive, send)
        finally:
            leave()
            disconnected.cancel()

    async def _run_exchange(self, exchange: Exchange) -> None:
        work = asyncio.ensure_future(self._stream(exchange) if exchange.request.stream else self._answer(exchange))
        exchange.disconnected.add_done_callback(lambda _: work.cancel())  # then the engine aborts the request
        try:
            with self._adapters.held(exchange.adapter):
                await work
        except asyncio.CancelledError:
            if not exchange.disconnected.done():
                raise
        finally:
            work.cancel()

    async def _answer(self, exchange: Exchange) -> None:
        final = None
        with engine_problems():
            async with aclosing(self._outputs(exchange)) as outputs:
                async for output in outputs:
                    final = output
        exchange.leave()  # the engine has finished it; a publish need not wait for the answer to be written
        assert final is not None
        if any(output.finish_reason == "abort" for output in final.outputs):
            self._gate.check()  # a server that is sent to sleep ends its requests too
            raise problems.stopping()
        check_finite(exchange.request, final.outputs)
        body = self._replies.whole(exchange.request, exchange.prompt, final, self._exact(exchange), exchange.adapter)
        length = (b"content-length", str(len(body)).encode())
        await exchange.send({"type": "http.response.start", "status": 200, "headers": [_JSON, length]})
        await exchange.send({"type": "http.response.body", "body": body})

    async def _stream(self, exchange: Exchange) -> None:
        started = False
        last = b"data: [DONE]\n\n"
        try:
            with engine_problems():
                async with aclosing(self._outputs(exchange)) as pieces:
                    async for piece in pieces:
                        events = self._events(exchange, piece, first=not started)
                        if (
                            not started
                        ):  # not before the engine has accepted the request: a refusal needs its own status
                            started = True
                            await exchange.send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                        await exchange.send({"type": "http.response.body", "body": events, "more_body": True})
        except Problem as problem:
            if not started:
                raise
            last = b"event: error\ndata: " + bytes(problem.response().body) + b"\n\n"
        await exchange.send({"type": "http.response.body", "body": last})

    def _events(self, exchange: Exchange, piece: Any, *, first: bool) -> bytes:
        request, exact = exchange.request, self._exact(exchange)
        check_finite(request, piece.outputs)
        head = self._replies.of_prompt(request, exchange.prompt, piece) if first else {}
        events = []
        for output in piece.outputs:
            events.append(self._replies.event(request, output, exact, exchange.adapter, head))
            head = {}
        return b"".join(events)

    def _outputs(self, exchange: Exchange) -> AsyncGenerator[Any, None]:
        lora_request = exchange.adapter.request if exchange.adapter else None
        return self._engine.generate(exchange.prompt, exchange.params, lora_request, exchange.trace_headers)

    def _exact(self, exchange: Exchange) -> bool | None:
        now = self._fence.publishes_keeping_kv
        return now == exchange.publishes_keeping_kv if now else None

    async def _tokens_of(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's tokens; refuse text of any kind if there is no tokenizer."""
        prompt = request.prompt
        if self._tokenizer is None and (request.stop or isinstance(prompt, str)):
            instead = 'prompt: this server has no tokenizer; send {"prompt_token_ids": [...]}'
            if not isinstance(prompt, str):
                instead = "stop: this server has no tokenizer; send stop_token_ids"
            raise Problem(422, "bad-request", instead)
        if isinstance(prompt, TokenPrompt):
            return prompt.prompt_token_ids
        if isinstance(prompt, list):
            return prompt
        most = self._engine.most_characters
        if len(prompt) > most:  # 10 MB would take 17 s to tokenise and be refused anyway
            detail = f"prompt: {len(prompt)} characters are more than the {most} that the context can hold"
            raise Problem(422, "bad-request", detail)
        if len(prompt) < _LONG_TEXT:
            return list(self._tokenizer.encode(prompt))
        return list(await asyncio.to_thread(self._tokenizer.encode, prompt))


def check_finite(request: GenerateRequest, outputs: list[Any]) -> None:
    if not all_finite(outputs):
        raise problems.nothing_to_sample(limited=request.limits_sampling)


def trace_headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by which a request continues a trace."""
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}


async def read_body(receive: Receive) -> bytes:
    """Return the whole body, up to a limit."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Problem(400, "disconnected", "the client disconnected before its request was read")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MAX_BODY_BYTES:
            raise Problem(413, "body-too-large", f"the body has more than {_MAX_BODY_BYTES >> 20} MiB")
        if not message.get("more_body"):
            return b"".join(parts)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `action` at its first call only."""
    done = False

    def act() -> None:
        nonlocal done
        if not done:
            done = True
            action()

    return act
