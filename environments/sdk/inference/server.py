"""HTTP servers: the base class of every kind, servers that only have OpenAI's protocol, and a check of the vocabulary.

`OpenAIServer` is good for evaluation and judging, not for training. `compare_vocabulary` checks before the first sample
that the environment's tokenizer is the one of the sampled model. An Atropos server reports the fingerprint of its
vocabulary; another server with vLLM's `/tokenize` has to encode a text made of tokens from the whole vocabulary. A
server with neither is trusted, and a log line says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio
import msgspec

from atropos_api.common.concurrency import run_blocking
from atropos_api.common.identity import fingerprint
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceRefused, TokenizerMismatch, TokensUnavailable
from environments.sdk.inference.http_transport import Transport
from environments.sdk.inference.retries import ServerChannel
from environments.sdk.inference.sampling import (
    OPENAI_ONLY,
    Failover,
    OnTokens,
    PromptLogprobs,
    Reasoning,
    Sample,
    Sampling,
    Split,
)

if TYPE_CHECKING:
    from environments.sdk.inference.sampling import Failover

__all__ = ["OpenAIServer", "refuse_for_training"]


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The newest policy version on a stock vLLM server: each has its own model name, which the broker reports."""

    name: str
    version: int | None


class HttpServer:
    """Base class of an inference server over HTTP: the kinds differ in `generate`."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.config = config
        self.channel = ServerChannel(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
        self.reasoning = Reasoning()
        self.policy: ServedPolicy | None = None
        self.load_tokenizer: Callable[[], Any] | None = None
        """Loads the tokenizer whose ids are sent, to compare it with the model's; the server's manager sets it."""
        self.in_flight = 0
        """Requests in progress, including those that wait for a place; the pool counts them."""
        self._requests: set[anyio.CancelScope] = set()
        self.answered = 0
        """Requests that were answered."""
        self.idle_since: float | None = time.monotonic()
        """Time since when no request is in progress; None while one is."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request that is in progress inside the block."""
        self.in_flight += 1
        self.idle_since = None
        try:
            yield
            self.answered += 1
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle_since = time.monotonic()

    @property
    def model_name(self) -> str:
        """The name of the model to request."""
        return self.config.model_name if self.policy is None else self.policy.name

    @contextmanager
    def presence(self) -> Iterator[anyio.CancelScope]:
        """Run the block until it ends or the server leaves."""
        with anyio.CancelScope() as scope:
            self._requests.add(scope)
            try:
                yield scope
            finally:
                self._requests.discard(scope)

    def leave(self) -> None:
        """End the requests in progress: the server is gone."""
        for scope in list(self._requests):
            scope.cancel()

    async def tokenizer_name(self) -> str | None:
        """Return the name or folder of the served model's tokenizer; None if the server does not report it."""
        return None

    async def generate(
        self,
        prompt_tokens: list[int],  # noqa: ARG002 - used by subclasses
        sampling: Sampling,  # noqa: ARG002
        split: Split,  # noqa: ARG002
        *,
        failover: Failover = None,  # noqa: ARG002
        on_tokens: OnTokens | None = None,  # noqa: ARG002
    ) -> list[Sample]:
        refuse_for_training(self.config)

    async def prompt_logprobs(
        self,
        prompt_tokens: list[int],  # noqa: ARG002 - used by subclasses
        top_k: int,  # noqa: ARG002
        split: Split,  # noqa: ARG002
        *,
        failover: Failover = None,  # noqa: ARG002
    ) -> PromptLogprobs:
        raise TokensUnavailable(
            f"server_type {self.config.server_type} ({self.config.base_url}) returns no logprobs of prompts; "
            "set --openai.server_type vllm and --openai.base_url to a server with /generate"
        )

    async def chat(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        split: Split,
        *,
        failover: Failover = None,
    ) -> dict[str, Any]:
        """Return the server's own chat completion, in OpenAI's form."""
        fields = _openai_fields(kwargs, {"messages": messages, "model": self.model_name})
        if not kwargs.get("skip_reasoning"):
            fields = self.reasoning.applied(fields, self.config.base_url)
        return await self._post(f"{self.config.base_url.rstrip('/')}/chat/completions", fields, split, failover)

    async def complete(
        self, prompt: str, kwargs: dict[str, Any], split: Split, *, failover: Failover = None
    ) -> dict[str, Any]:
        """Return the server's own text completion, in OpenAI's form."""
        fields = _openai_fields(kwargs, {"prompt": prompt, "model": self.model_name})
        return await self._post(f"{self.config.base_url.rstrip('/')}/completions", fields, split, failover)

    def metrics(self, name: str) -> dict[str, float]:
        """Return timings of the server `name` by the original Atropos' names, separate for training and evaluation."""
        train, evaluation = self.channel.timings["train"], self.channel.timings["eval"]
        prefix = f"server/{name}_"
        if not train.seconds and not evaluation.seconds:
            return {}
        return {
            **train.summary(prefix),
            **evaluation.summary(f"{prefix}eval_"),
            f"{prefix}average_num_attempts": train.mean_attempts,
            f"{prefix}eval_retry_rate": evaluation.retry_rate,
        }

    async def aclose(self) -> None:
        await self.channel.aclose()

    async def _get_object(self, url: str, failover: Failover = None) -> dict[str, Any]:
        """Return the JSON object at `url`; an empty one if the server has none."""
        try:
            return msgspec.json.decode(await self.channel.get(url, failover=failover) or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return {}

    async def _post(self, url: str, fields: dict[str, Any], split: Split, failover: Failover) -> dict[str, Any]:
        answer = await self.channel.post(url, msgspec.json.encode(fields), split, failover=failover)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InferenceRefused(f"{url} sent an unexpected answer: {error}") from error


def refuse_for_training(config: APIServerConfig) -> NoReturn:
    raise TokensUnavailable(
        f"server_type {config.server_type} ({config.base_url}) returns no token ids and logprobs, "
        "which training needs; set --openai.server_type vllm and --openai.base_url to a server with /generate"
    )


def _openai_fields(kwargs: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fields to send to a provider, without those that OpenAI's own library does not send."""
    extra = kwargs.get("extra_body") or {}
    given = {name: value for name, value in kwargs.items() if name not in OPENAI_ONLY and value is not None}
    return {**given, **extra, **fixed}


class OpenAIServer(HttpServer):
    """A server with OpenAI's API only: it returns text, so `generate` refuses."""


logger = logging.getLogger(__name__)

PROBED_TOKENS: Final = (512, 64)
"""Numbers of tokens of the text to encode; the smaller one is for servers whose context the larger one exceeds."""


async def compare_vocabulary(server: HttpServer, tokenizer: Any, reported: str | None, failover: Failover) -> None:
    """Raise `TokenizerMismatch` unless `tokenizer` is the server's; `reported` is the fingerprint that it reports."""
    ours = vocabulary_of(tokenizer)
    if ours is None:
        logger.info("the tokenizer has no vocabulary that could be compared with that of %s", server.config.root_url)
    elif reported is None:
        await _compare_by_text(server, tokenizer, ours, failover)
    elif fingerprint(ours) != reported and await _full_fingerprint(tokenizer) != reported:
        raise _mismatch(server, tokenizer, "their vocabularies differ")


def vocabulary_of(tokenizer: Any) -> Mapping[str, int] | None:
    get = getattr(tokenizer, "get_vocab", None)
    return None if get is None else dict(get())


def probe_text(tokenizer: Any, vocabulary: Mapping[str, int], count: int) -> str:
    """Return words of about `count` tokens from the whole vocabulary, without tokens that are not printable."""
    ids = sorted(set(vocabulary.values()))
    chosen = ids[:: max(1, len(ids) // count)]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = (tokenizer.decode([index]) for index in chosen if index not in special)
    return " ".join(text.strip() for text in texts if text.strip() and text.isprintable() and "\ufffd" not in text)


async def _compare_by_text(
    server: HttpServer, tokenizer: Any, vocabulary: Mapping[str, int], failover: Failover
) -> None:
    url = f"{server.config.root_url}/tokenize"
    for count in PROBED_TOKENS:
        text = probe_text(tokenizer, vocabulary, count)
        body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
        try:
            answer = msgspec.json.decode(await server.channel.post(url, body, "train", failover=failover))
            theirs = [int(token) for token in answer["tokens"]]
        except (InferenceRefused, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            logger.debug("%s could not tokenise a text of %d tokens: %s", url, count, error)
            continue
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            detail = "they encode a text as different numbers of tokens"
            if at is not None:
                detail = f"{tokenizer.decode([ours[at]])!r} is token {ours[at]} here and {theirs[at]} there"
            raise _mismatch(server, tokenizer, detail)
        return
    logger.info("%s reports nothing about its tokenizer, so it is not compared with ours", server.config.root_url)


async def _full_fingerprint(tokenizer: Any) -> str | None:
    """Return the fingerprint of transformers' own tokenizer: it may have tokens that `tokenizer.json` lacks."""
    load = getattr(tokenizer, "load_full", None)
    if load is None:
        return None
    full = await run_blocking(load, about="the tokenizer as transformers reads it")
    return fingerprint(full.get_vocab())


def _mismatch(server: HttpServer, tokenizer: Any, detail: str) -> TokenizerMismatch:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return TokenizerMismatch(
        f"the tokenizer {name} is not that of {server.model_name} at {server.config.base_url}: {detail}; leave out "
        "--env.tokenizer_name to take the server's, or name that model's"
    )
