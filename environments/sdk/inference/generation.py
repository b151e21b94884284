"""What an inference server sampled for one prompt, in one form for every kind of server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from atropos_api.wire.groups import Span
from environments.sdk.config import APIServerConfig
from environments.sdk.inference.sampling import Sampling

if TYPE_CHECKING:
    from environments.sdk.inference.channel import Elsewhere

Split = Literal["train", "eval"]

OnTokens = Callable[[int, list[int], list[float]], None]
"""Handed the number of a sample and its next tokens and logprobs, while the server goes on sampling."""


@dataclass(slots=True)
class Sample:
    """One completion: exactly the tokens that came back, never text encoded again."""

    tokens: list[int]
    logprobs: list[float]
    """One a token; empty when the server tells none, and then nothing of it can be trained on."""
    finish_reason: str
    versions: list[Span]
    """Spans over `tokens` alone, counted from 0; empty when the server tells none."""


@dataclass(slots=True)
class PromptLogprobs:
    """What a model thinks of each token of a given text; the first position has no entries."""

    prompt_tokens: list[int]
    token_ids: list[list[int]]
    """At each position the most likely tokens, best first; the given token alone where none were asked for."""
    logprobs: list[list[float]]

    def as_mapping(self) -> dict[str, Any]:
        """By Atropos' names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_topk_token_ids": self.token_ids,
            "prompt_topk_logprobs": self.logprobs,
        }


class InferenceServer(Protocol):
    """One server, or several behind one object, that samples from prompts of tokens."""

    @property
    def config(self) -> APIServerConfig: ...

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        elsewhere: Elsewhere = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample from a prompt of tokens; raises `TokensUnavailable` where the server gives none.

        A server that streams hands tokens to `on_tokens` as they come; one that does not never calls it.
        """
        ...

    async def prompt_logprobs(
        self, prompt_tokens: list[int], top_k: int, split: Split, *, elsewhere: Elsewhere = None
    ) -> PromptLogprobs:
        """The logprobs of the prompt itself."""
        ...
