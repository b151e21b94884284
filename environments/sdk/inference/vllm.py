"""Client of vLLM servers: it asks for token ids and logprobs in the form that the server has.

The Atropos server (`example_trainer.serving`) answers in compact form, others with a `/generate` route in the original
Atropos' form, and a stock vLLM server, which has no such route, through its `/v1/completions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import anyio
import msgspec

from atropos_api.common.sampling_values import WHOLE_DISTRIBUTION
from atropos_api.wire.groups import Span
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceRefused
from environments.sdk.inference.http_transport import PlainEvents, PlainReply, SampleEvents, Transport
from environments.sdk.inference.sampling import (
    Failover,
    OnTokens,
    PromptLogprobs,
    Sample,
    Sampling,
    Split,
)
from environments.sdk.inference.server import HttpServer, compare_vocabulary

MOST_TOKENS = 1 << 31
"""Limit on token ids: they are 32-bit integers everywhere."""
Dialect = Literal["compact", "atropos", "plain"]


class CompactReply(msgspec.Struct):
    """Answer of the Atropos server to `"compact": true`."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str | None]
    policy_versions: list[list[Span]]
    sampling_masks: list[list[list[int]]] | None = None


class AtroposReply(msgspec.Struct):
    """Answer of servers with the original Atropos' protocol: newer ones return `token_ids` apart from the logprobs.

    At each position the first entry of the first mapping is the sampled token. Tuples, because parsing a thousand of
    them costs half as much as lists.
    """

    logprobs: list[list[tuple[dict[str, float], ...]]]
    finish_reasons: list[str | None]
    token_ids: list[list[int]] | None = None
    policy_versions: list[list[Span]] | None = None


class PromptReply(msgspec.Struct):
    """Answer with prompt logprobs: only this field is read, and some servers nest its positions in one more list."""

    prompt_logprobs: list[Any] | None = None


class VllmServer(HttpServer):
    """One vLLM server: it has a `/generate` route or is a stock one."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        super().__init__(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
        self._url = f"{config.root_url}/generate"
        self._dialect: Dialect | None = None
        self._detecting = anyio.Lock()
        self._encoder = msgspec.json.Encoder()
        self._compact_decoder = msgspec.json.Decoder(CompactReply)
        self._atropos_decoder = msgspec.json.Decoder(AtroposReply)

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        failover: Failover = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        dialect = self._dialect or await self._detect_dialect(failover)
        if dialect == "plain":
            return await self._generate_by_completions(prompt_tokens, sampling, split, failover, on_tokens)
        fields: dict[str, Any] = {"prompt": {"prompt_token_ids": prompt_tokens}, "logprobs": 0, **sampling.payload()}
        if dialect == "compact":
            fields["compact"] = True
            if sampling.mask_limit:
                fields["sampling_mask_limit"] = sampling.mask_limit
            if on_tokens is not None:
                return await self._stream(fields, SampleEvents(sampling.n, on_tokens, self._url), split, failover)
        body = await self.channel.post(self._url, self._encoder.encode(fields), split, failover=failover)
        return self._read(body)

    async def _stream(
        self, fields: dict[str, Any], events: SampleEvents, split: Split, failover: Failover
    ) -> list[Sample]:
        body = self._encoder.encode({**fields, "stream": True})
        await self.channel.post(self._url, body, split, failover=failover, on_piece=events.feed)
        return events.finished()

    async def prompt_logprobs(
        self, prompt_tokens: list[int], top_k: int, split: Split, *, failover: Failover = None
    ) -> PromptLogprobs:
        fields = {
            "prompt": {"prompt_token_ids": prompt_tokens},
            "prompt_logprobs": max(1, top_k),
            "logprobs": 0,
            "n": 1,
            "max_tokens": 1,
            "temperature": 0.0,
            "top_p": 1.0,
        }
        if self._dialect is None:
            await self._detect_dialect(failover)
        body = await self.channel.post(self._url, self._encoder.encode(fields), split, failover=failover)
        try:
            found = msgspec.json.decode(body, type=PromptReply).prompt_logprobs
        except msgspec.MsgspecError as error:
            raise InferenceRefused(f"{self._url} sent an unexpected answer: {error}") from error
        if found is None:
            raise InferenceRefused(f"{self._url} answered without prompt_logprobs; that server cannot be a teacher")
        return top_of_prompt(prompt_tokens, found, top_k, self._url)

    async def tokenizer_name(self) -> str | None:
        root = self.config.root_url
        info = await self._get_object(f"{root}/bridge/info")
        if found := info.get("tokenizer") or info.get("model"):
            return str(found)
        listed = (await self._get_object(f"{root}/v1/models")).get("data") or []
        bases = [entry for entry in listed if isinstance(entry, dict) and not entry.get("parent")]
        return str(bases[0].get("root") or bases[0].get("id")) if bases else None

    async def _detect_dialect(self, failover: Failover) -> Dialect:
        """Detect the server's protocol before the first request, and compare its vocabulary with the tokenizer's."""
        async with self._detecting:
            if self._dialect is None:
                info = await self._get_object(f"{self.config.root_url}/bridge/info", failover)
                dialect = await self._dialect_of(info, failover)
                if self.load_tokenizer is not None:
                    await compare_vocabulary(self, self.load_tokenizer(), info.get("vocabulary"), failover)
                self._dialect = dialect
            return self._dialect

    async def _dialect_of(self, info: Mapping[str, Any], failover: Failover) -> Dialect:
        """Return the server's protocol: only an Atropos server reports a boot id; a stock one lists no `/generate`
        route.
        """
        if "boot_id" in info:
            return "compact"
        routes = await self.channel.get(f"{self.config.root_url}/openapi.json", failover=failover) or b""
        return "plain" if b'"/v1/completions"' in routes and b'"/generate"' not in routes else "atropos"

    async def _generate_by_completions(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        failover: Failover,
        on_tokens: OnTokens | None,
    ) -> list[Sample]:
        """Sample by vLLM's own completions route; the model name in the request determines the policy version."""
        policy = self.policy
        # Without the neutral values Qwen2.5 would be sampled with top_p 0.8 and top_k 20, and no group would say so.
        fields: dict[str, Any] = {**WHOLE_DISTRIBUTION, **sampling.payload()}
        fields |= {"model": self.model_name, "prompt": prompt_tokens, "logprobs": 0, "return_token_ids": True}
        url = f"{self.config.root_url}/v1/completions"
        if on_tokens is None:
            body = self._encoder.encode(fields)
            samples = _from_plain(await self.channel.post(url, body, split, failover=failover), url)
        else:
            events = PlainEvents(sampling.n, on_tokens, url)
            body = self._encoder.encode({**fields, "stream": True})
            await self.channel.post(url, body, split, failover=failover, on_piece=events.feed)
            samples = events.finished()
        if policy is not None and policy.version is not None:
            for sample in samples:
                sample.versions = [(0, len(sample.tokens), policy.version)] if sample.tokens else []
        return samples

    def _read(self, body: bytes) -> list[Sample]:
        try:
            if self._dialect == "compact":
                samples = _from_compact(self._compact_decoder.decode(body))
            else:
                samples = _from_atropos(self._atropos_decoder.decode(body))
        except (msgspec.ValidationError, ValueError, IndexError, StopIteration) as error:  # lists of unequal lengths
            raise InferenceRefused(f"{self._url} sent an unexpected answer: {error}") from error
        for sample in samples:
            if len(sample.tokens) != len(sample.logprobs):
                counts = f"{len(sample.tokens)} tokens and {len(sample.logprobs)} logprobs"
                raise InferenceRefused(f"{self._url} sent an unexpected answer: {counts} of one output")
            if sample.sampling_masks is not None and len(sample.sampling_masks) != len(sample.tokens):
                counts = f"{len(sample.tokens)} tokens and {len(sample.sampling_masks)} sampling masks"
                raise InferenceRefused(f"{self._url} sent an unexpected answer: {counts} of one output")
            if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < MOST_TOKENS:
                lowest = min(sample.tokens)
                raise InferenceRefused(f"{self._url} sent an unexpected answer: token {lowest} is not an id")
        return samples


def _from_compact(reply: CompactReply) -> list[Sample]:
    masks: Sequence[list[list[int]] | None] = reply.sampling_masks or [None] * len(reply.token_ids)
    parts = zip(reply.token_ids, reply.logprobs, reply.finish_reasons, reply.policy_versions, masks, strict=True)
    return [Sample(tokens, logprobs, reason or "stop", spans, kept) for tokens, logprobs, reason, spans, kept in parts]


def _from_plain(body: bytes, url: str) -> list[Sample]:
    try:
        choices = msgspec.json.decode(body, type=PlainReply).choices
    except msgspec.MsgspecError as error:
        raise InferenceRefused(f"{url} sent an unexpected answer: {error}") from error
    if any(choice.token_ids is None or choice.logprobs is None for choice in choices):
        raise InferenceRefused(f"{url} answered without token_ids or logprobs; vLLM 0.32 or newer returns them")
    return [
        Sample(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason or "stop", [])
        for choice in choices
        if choice.token_ids is not None and choice.logprobs is not None
    ]


def _from_atropos(reply: AtroposReply) -> list[Sample]:
    samples = []
    for index, positions in enumerate(reply.logprobs):
        tokens = (
            [int(next(iter(position[0]))) for position in positions]
            if reply.token_ids is None
            else reply.token_ids[index]
        )
        versions = reply.policy_versions[index] if reply.policy_versions is not None else []
        samples.append(Sample(tokens, _first_values(positions), reply.finish_reasons[index] or "stop", versions))
    return samples


def _first_values(positions: list[tuple[dict[str, float], ...]]) -> list[float]:
    """Return the first logprob of each position; usually there is only one."""
    values = [value for position in positions for value in position[0].values()]
    return values if len(values) == len(positions) else [next(iter(position[0].values())) for position in positions]


def top_of_prompt(prompt_tokens: list[int], positions: list[Any], top_k: int, url: str) -> PromptLogprobs:
    """Return the `top_k` most likely tokens of each position; with 0 or less the prompt's own token alone."""
    if len(positions) == 1 and isinstance(positions[0], list) and len(prompt_tokens) != 1:
        positions = positions[0]
    if len(positions) != len(prompt_tokens):
        raise InferenceRefused(
            f"{url} returned logprobs of {len(positions)} positions for a prompt of {len(prompt_tokens)} tokens"
        )
    ids, logprobs, given = [], [], []
    for own, entry in zip(prompt_tokens, positions, strict=True):
        known = _entries(entry)
        if top_k > 0:
            best = sorted(known.items(), key=lambda pair: pair[1], reverse=True)[:top_k]
        else:
            best = [(own, known[own])] if own in known else []
        ids.append([token for token, _ in best])
        logprobs.append([value for _, value in best])
        given.append(known.get(own))
    return PromptLogprobs(prompt_tokens, ids, logprobs, given)


def _entries(entry: Any) -> dict[int, float]:
    """Return one position's logprobs, given as null, `{id: logprob}`, a list of such or `{id: {"logprob": …}}`."""
    parts = entry if isinstance(entry, list) else [entry or {}]
    return {
        int(token): float(value["logprob"] if isinstance(value, dict) else value)
        for part in parts
        for token, value in (part or {}).items()
    }
