"""Servers that only speak OpenAI's protocol: good for evaluation and judging, not for training."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import TokensUnavailable
from environments.sdk.inference.channel import Channel
from environments.sdk.inference.generation import Sample, Split
from environments.sdk.inference.sampling import Sampling
from environments.sdk.inference.transport import Transport


class OpenAIServer:
    """One server of the chat completions API."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.config = config
        self._channel = Channel(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)

    @property
    def in_flight(self) -> int:
        return self._channel.in_flight

    async def generate(self, prompt_tokens: list[int], sampling: Sampling, split: Split) -> list[Sample]:  # noqa: ARG002
        refuse_for_training(self.config)

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]:
        fields = {**kwargs, "messages": messages, "model": self.config.model_name}
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        answer = await self._channel.post(url, msgspec.json.encode(fields), split)
        return msgspec.json.decode(answer, type=dict[str, Any])

    async def aclose(self) -> None:
        await self._channel.aclose()


def refuse_for_training(config: APIServerConfig) -> NoReturn:
    raise TokensUnavailable(
        f"server_type {config.server_type} ({config.base_url}) returns no token ids and logprobs, "
        "which training needs; set --openai.server_type vllm and --openai.base_url to a server with /generate"
    )
