"""What an inference server sampled for one prompt, in one form for every kind of server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from atropos_api.wire.groups import Span
from environments.sdk.config import APIServerConfig
from environments.sdk.inference.sampling import Sampling

Split = Literal["train", "eval"]


@dataclass(slots=True)
class Sample:
    """One completion: exactly the tokens that came back, never text encoded again."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[Span]
    """Spans over `tokens` alone, counted from 0; empty when the server tells none."""


class InferenceServer(Protocol):
    """One server of one kind."""

    config: APIServerConfig

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        ...

    async def generate(self, prompt_tokens: list[int], sampling: Sampling, split: Split) -> list[Sample]:
        """Sample from a prompt of tokens; raises `TokensUnavailable` where the server gives none."""
        ...

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]:
        """A chat completion in OpenAI's form, made by the server itself."""
        ...

    async def aclose(self) -> None: ...
