"""What the servers of every kind share: one channel, and what the pool wants to know of it.

Servers that only speak OpenAI's protocol: good for evaluation and judging, not for training.

Whether an environment's tokenizer is that of the model it samples from, found out before the first sample.

Our server tells the fingerprint of its vocabulary. Another one with vLLM's `/tokenize` is asked to read a text made of
tokens from the whole vocabulary. One with neither is taken at its word, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from atropos_api.common.concurrency import run_blocking
from atropos_api.common.identity import fingerprint
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceRefused, TokenizerMismatch, TokensUnavailable
from environments.sdk.inference.http_transport import Transport
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
from environments.sdk.inference.server_channel import ServerChannel

if TYPE_CHECKING:
    from environments.sdk.inference.sampling import Failover

__all__ = ["OpenAIServer", "refuse_for_training"]


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The newest policy where a plain server has each version under a name of its own, as the broker tells it."""

    name: str
    version: int | None


class HttpServer:
    """One server over HTTP; the kinds differ in `generate`."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.config = config
        self.channel = ServerChannel(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
        self.reasoning = Reasoning()
        self.policy: ServedPolicy | None = None
        self.load_tokenizer: Callable[[], Any] | None = None
        """Gives the tokenizer whose ids are sent, to compare it with the model's; its manager sets it."""
        self.in_flight = 0
        """Requests under way, those that wait for a place among them; the pool counts."""

    @property
    def model_name(self) -> str:
        """The model to ask for."""
        return self.config.model_name if self.policy is None else self.policy.name

    async def tokenizer_name(self) -> str | None:
        """The name or folder of the tokenizer of the model that is served; None from servers that do not tell."""
        return None

    async def generate(
        self,
        prompt_tokens: list[int],  # noqa: ARG002 - the interface of the kinds that can
        sampling: Sampling,  # noqa: ARG002
        split: Split,  # noqa: ARG002
        *,
        elsewhere: Failover = None,  # noqa: ARG002
        on_tokens: OnTokens | None = None,  # noqa: ARG002
    ) -> list[Sample]:
        refuse_for_training(self.config)

    async def prompt_logprobs(
        self,
        prompt_tokens: list[int],  # noqa: ARG002 - the interface of the kinds that can
        top_k: int,  # noqa: ARG002
        split: Split,  # noqa: ARG002
        *,
        elsewhere: Failover = None,  # noqa: ARG002
    ) -> PromptLogprobs:
        raise TokensUnavailable(
            f"server_type {self.config.server_type} ({self.config.base_url}) tells no logprobs of prompts; "
            "set --openai.server_type vllm and --openai.base_url to a server with /generate"
        )

    async def chat(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        split: Split,
        *,
        elsewhere: Failover = None,
    ) -> dict[str, Any]:
        """The server's own chat completion, in OpenAI's form."""
        fields = _openai_fields(kwargs, {"messages": messages, "model": self.model_name})
        if not kwargs.get("skip_reasoning"):
            fields = self.reasoning.applied(fields, self.config.base_url)
        return await self._post(f"{self.config.base_url.rstrip('/')}/chat/completions", fields, split, elsewhere)

    async def complete(
        self, prompt: str, kwargs: dict[str, Any], split: Split, *, elsewhere: Failover = None
    ) -> dict[str, Any]:
        """The server's own text completion, in OpenAI's form."""
        fields = _openai_fields(kwargs, {"prompt": prompt, "model": self.model_name})
        return await self._post(f"{self.config.base_url.rstrip('/')}/completions", fields, split, elsewhere)

    def metrics(self, index: int) -> dict[str, float]:
        """Timings by Atropos' names, those of training and of evaluation apart."""
        train, evaluation = self.channel.timings["train"], self.channel.timings["eval"]
        prefix = f"server/server_{index}_"
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

    async def _get_object(self, url: str, elsewhere: Failover = None) -> dict[str, Any]:
        """The JSON object there; an empty one from a server that has none."""
        try:
            return msgspec.json.decode(await self.channel.get(url, elsewhere=elsewhere) or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return {}

    async def _post(self, url: str, fields: dict[str, Any], split: Split, elsewhere: Failover) -> dict[str, Any]:
        answer = await self.channel.post(url, msgspec.json.encode(fields), split, elsewhere=elsewhere)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InferenceRefused(f"{url} answered something unexpected: {error}") from error


def refuse_for_training(config: APIServerConfig) -> NoReturn:
    raise TokensUnavailable(
        f"server_type {config.server_type} ({config.base_url}) returns no token ids and logprobs, "
        "which training needs; set --openai.server_type vllm and --openai.base_url to a server with /generate"
    )


def _openai_fields(kwargs: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """The request's fields as a provider takes them: what its own library would keep to itself is left out."""
    extra = kwargs.get("extra_body") or {}
    given = {name: value for name, value in kwargs.items() if name not in OPENAI_ONLY and value is not None}
    return {**given, **extra, **fixed}


class OpenAIServer(HttpServer):
    """One server of the chat completions API; it gives text, so `generate` refuses."""


logger = logging.getLogger(__name__)

PROBED_TOKENS: Final = (512, 64)
"""How many tokens make the text to be read; the shorter one is for servers whose context the longer one exceeds."""


async def compare_vocabulary(server: HttpServer, tokenizer: Any, told: str | None, elsewhere: Failover) -> None:
    """Raise `TokenizerMismatch` unless `tokenizer` is the server's; `told` is the fingerprint that it tells, if any."""
    ours = vocabulary_of(tokenizer)
    if ours is None:
        logger.info("the tokenizer has no vocabulary that could be compared with that of %s", server.config.root_url)
    elif told is None:
        await _compare_by_text(server, tokenizer, ours, elsewhere)
    elif fingerprint(ours) != told and await _full_fingerprint(tokenizer) != told:
        raise _mismatch(server, tokenizer, "their vocabularies differ")


def vocabulary_of(tokenizer: Any) -> Mapping[str, int] | None:
    get = getattr(tokenizer, "get_vocab", None)
    return None if get is None else dict(get())


def probe_text(tokenizer: Any, vocabulary: Mapping[str, int], count: int) -> str:
    """Words of about `count` tokens from all over the vocabulary; what is no text of its own is left out."""
    ids = sorted(set(vocabulary.values()))
    chosen = ids[:: max(1, len(ids) // count)]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = (tokenizer.decode([index]) for index in chosen if index not in special)
    return " ".join(text.strip() for text in texts if text.strip() and text.isprintable() and "\ufffd" not in text)


async def _compare_by_text(
    server: HttpServer, tokenizer: Any, vocabulary: Mapping[str, int], elsewhere: Failover
) -> None:
    url = f"{server.config.root_url}/tokenize"
    for count in PROBED_TOKENS:
        text = probe_text(tokenizer, vocabulary, count)
        body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
        try:
            answer = msgspec.json.decode(await server.channel.post(url, body, "train", elsewhere=elsewhere))
            theirs = [int(token) for token in answer["tokens"]]
        except (InferenceRefused, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            logger.debug("%s reads no text of %d tokens: %s", url, count, error)
            continue
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            detail = "they read a text as different numbers of tokens"
            if at is not None:
                detail = f"{tokenizer.decode([ours[at]])!r} is token {ours[at]} here and {theirs[at]} there"
            raise _mismatch(server, tokenizer, detail)
        return
    logger.info("%s tells nothing of its tokenizer, so it is not compared with ours", server.config.root_url)


async def _full_fingerprint(tokenizer: Any) -> str | None:
    """That of transformers' own tokenizer: a model's files may add tokens that `tokenizer.json` does not hold."""
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
