"""Clients of two further kinds of inference servers: SGLang's own `/generate`, and TRL's generation server.

SGLang takes token ids and returns `[logprob, token id, text]` triples. TRL takes texts and returns token ids; its
samples can be trained on only if it returns logprobs and has encoded the prompt to exactly the intended tokens,
otherwise they come without logprobs, and sessions that collect for training refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atropos_api.wire.groups import Span
from environments.sdk.errors import InferenceRefused
from environments.sdk.inference.sampling import Failover, OnTokens, PromptLogprobs, Sample, Sampling, Split
from environments.sdk.inference.server import HttpServer, refuse_for_training

Triple = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct):
    """Description of one output: only these fields of `meta_info` are read."""

    finish_reason: dict[str, Any] | str | None = None
    output_token_logprobs: list[Triple] | None = None
    input_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None
    weight_version: str | None = None


class Output(msgspec.Struct):
    meta_info: MetaInfo


class SglangServer(HttpServer):
    """One SGLang server: the policy version is known only if `weight_version` was set to a number there."""

    async def tokenizer_name(self) -> str | None:
        info = await self._get_object(f"{self.config.root_url}/get_model_info")
        found = info.get("tokenizer_path") or info.get("model_path")
        return None if found is None else str(found)

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        failover: Failover = None,
        on_tokens: OnTokens | None = None,  # noqa: ARG002 - this kind does not stream here
    ) -> list[Sample]:
        outputs = await self._ask(prompt_tokens, _parameters(sampling), {}, split, failover)
        return [self._sample(output.meta_info) for output in outputs]

    async def prompt_logprobs(
        self, prompt_tokens: list[int], top_k: int, split: Split, *, failover: Failover = None
    ) -> PromptLogprobs:
        more = {"logprob_start_len": 0, "top_logprobs_num": max(0, top_k)}
        parameters = {"max_new_tokens": 1, "temperature": 0.0}
        (output,) = await self._ask(prompt_tokens, parameters, more, split, failover)
        info = output.meta_info
        own = info.input_token_logprobs or []
        if top_k > 0:
            positions = [position or [] for position in info.input_top_logprobs or []]
        else:
            positions = [[triple] for triple in own]
        if len(positions) != len(prompt_tokens):
            raise InferenceRefused(f"{self._url} returned no logprobs of the prompt's {len(prompt_tokens)} tokens")
        known = [[(token, value) for value, token, _ in position if value is not None] for position in positions]
        return PromptLogprobs(
            prompt_tokens,
            [[token for token, _ in position] for position in known],
            [[value for _, value in position] for position in known],
            [value for value, _, _ in own] if len(own) == len(prompt_tokens) else [None] * len(prompt_tokens),
        )

    @property
    def _url(self) -> str:
        return f"{self.config.root_url}/generate"

    async def _ask(
        self,
        prompt_tokens: list[int],
        parameters: dict[str, Any],
        more: dict[str, Any],
        split: Split,
        failover: Failover,
    ) -> list[Output]:
        fields = {
            "input_ids": prompt_tokens,
            "sampling_params": parameters,
            "return_logprob": True,
            "return_text_in_logprobs": False,
            **more,
        }
        body = await self.channel.post(self._url, msgspec.json.encode(fields), split, failover=failover)
        try:
            if body.lstrip()[:1] == b"[":
                return msgspec.json.decode(body, type=list[Output])
            return [msgspec.json.decode(body, type=Output)]
        except msgspec.MsgspecError as error:
            raise InferenceRefused(f"{self._url} sent an unexpected answer: {error}") from error

    def _sample(self, info: MetaInfo) -> Sample:
        triples = info.output_token_logprobs
        if triples is None or any(value is None for value, _, _ in triples):
            raise InferenceRefused(f"{self._url} answered without output_token_logprobs")
        reason = info.finish_reason
        if isinstance(reason, dict):
            reason = str(reason.get("type", "stop"))
        return Sample(
            [token for _, token, _ in triples],
            [float(value) for value, _, _ in triples if value is not None],
            reason or "stop",
            _spans(info.weight_version, len(triples)),
        )


SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters by SGLang's names; no limit of tokens is null, since its default is 128."""
    return {SGLANG_NAMES.get(name, name): value for name, value in sampling.payload().items()}


def _spans(version: str | None, count: int) -> list[Span]:
    return [(0, count, int(version))] if version is not None and version.isdecimal() and count else []


DEFAULT_MAX_TOKENS = 1024
TRL_DEFAULTS = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
TRL_FIELDS = ("n", "temperature", "max_tokens", *TRL_DEFAULTS)
"""Parameters that have a field of their own there; stop strings and all others are in `generation_kwargs`."""


class TrlReply(msgspec.Struct):
    completion_ids: list[list[int]]
    prompt_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class TrlServer(HttpServer):
    """One TRL server: `decode` turns prompts of tokens into the text that it takes, and the server manager sets it."""

    decode: Callable[[Sequence[int]], str] | None = None

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        failover: Failover = None,
        on_tokens: OnTokens | None = None,  # noqa: ARG002 - this kind does not stream here
    ) -> list[Sample]:
        if self.decode is None:
            refuse_for_training(self.config)
        reply = await self._ask(self.decode(prompt_tokens), sampling, split, failover)
        trainable = reply.logprobs is not None and (reply.prompt_ids or [[]])[0] == prompt_tokens
        logprobs = reply.logprobs if trainable and reply.logprobs is not None else [[] for _ in reply.completion_ids]
        limit = sampling.max_tokens or DEFAULT_MAX_TOKENS
        return [
            Sample(tokens, known, "length" if len(tokens) >= limit else "stop", [])
            for tokens, known in zip(reply.completion_ids, logprobs, strict=True)
        ]

    async def _ask(self, prompt: str, sampling: Sampling, split: Split, failover: Failover) -> TrlReply:
        asked = {**TRL_DEFAULTS, **sampling.payload()}
        asked["max_tokens"] = sampling.max_tokens or DEFAULT_MAX_TOKENS
        fields: dict[str, Any] = {"prompts": [prompt], **{name: asked.pop(name) for name in TRL_FIELDS}}
        if asked:
            fields["generation_kwargs"] = asked
        url = f"{self.config.base_url.rstrip('/')}/generate/"
        body = await self.channel.post(url, msgspec.json.encode(fields), split, failover=failover)
        try:
            return msgspec.json.decode(body, type=TrlReply)
        except msgspec.MsgspecError as error:
            raise InferenceRefused(f"{url} sent an unexpected answer: {error}") from error
