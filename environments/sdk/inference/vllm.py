"""The `/generate` protocol: token ids and logprobs in compact form from our server, Atropos' form from any other."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from atropos_api.wire.groups import Span
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceRefused
from environments.sdk.inference.channel import Channel
from environments.sdk.inference.generation import Sample, Split
from environments.sdk.inference.sampling import Sampling
from environments.sdk.inference.transport import Transport


class CompactReply(msgspec.Struct):
    """What our server answers to `"compact": true`."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str | None]
    policy_versions: list[list[Span]]


class AtroposReply(msgspec.Struct):
    """What servers of Atropos' protocol answer; newer ones tell `token_ids` apart from the logprobs."""

    logprobs: list[list[list[dict[str, float]]]]
    finish_reasons: list[str | None]
    token_ids: list[list[int]] | None = None
    policy_versions: list[list[Span]] | None = None


class VllmServer:
    """One vLLM server with a `/generate` route."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.config = config
        self._channel = Channel(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
        self._url = f"{config.root_url}/generate"
        self._compact: bool | None = None
        self._asking = anyio.Lock()
        self._encoder = msgspec.json.Encoder()
        self._decoders = msgspec.json.Decoder(CompactReply), msgspec.json.Decoder(AtroposReply)

    @property
    def in_flight(self) -> int:
        return self._channel.in_flight

    async def generate(self, prompt_tokens: list[int], sampling: Sampling, split: Split) -> list[Sample]:
        if self._compact is None:
            await self._learn_dialect()
        fields: dict[str, Any] = {"prompt": {"prompt_token_ids": prompt_tokens}, "logprobs": 0, **sampling.payload()}
        if self._compact:
            fields["compact"] = True
        body = await self._channel.post(self._url, self._encoder.encode(fields), split)
        return self._read(body)

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]:
        """The server's own chat route; sessions and the manager prefer `generate`."""
        fields = {**kwargs, "messages": messages, "model": self.config.model_name}
        answer = await self._channel.post(
            f"{self.config.root_url}/v1/chat/completions", self._encoder.encode(fields), split
        )
        return msgspec.json.decode(answer, type=dict[str, Any])

    async def aclose(self) -> None:
        await self._channel.aclose()

    async def _learn_dialect(self) -> None:
        """Find out whether the server knows the compact form: only ours does, and only ours tells a boot id."""
        async with self._asking:
            if self._compact is not None:
                return
            info = await self._channel.get(f"{self.config.root_url}/bridge/info")
            self._compact = info is not None and b'"boot_id"' in info

    def _read(self, body: bytes) -> list[Sample]:
        compact, atropos = self._decoders
        try:
            return _from_compact(compact.decode(body)) if self._compact else _from_atropos(atropos.decode(body))
        except msgspec.ValidationError as error:
            raise InferenceRefused(f"{self._url} answered something unexpected: {error}") from error


def _from_compact(reply: CompactReply) -> list[Sample]:
    parts = zip(reply.token_ids, reply.logprobs, reply.finish_reasons, reply.policy_versions, strict=True)
    return [Sample(tokens, logprobs, reason or "stop", versions) for tokens, logprobs, reason, versions in parts]


def _from_atropos(reply: AtroposReply) -> list[Sample]:
    samples = []
    for index, positions in enumerate(reply.logprobs):
        chosen = [next(iter(position[0].items())) for position in positions]
        tokens = reply.token_ids[index] if reply.token_ids is not None else [int(token) for token, _ in chosen]
        versions = reply.policy_versions[index] if reply.policy_versions is not None else []
        samples.append(
            Sample(tokens, [logprob for _, logprob in chosen], reply.finish_reasons[index] or "stop", versions)
        )
    return samples
