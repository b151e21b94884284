"""Client of TRL's generation server: it takes texts and returns token ids.

Its samples can be trained on only if it returns logprobs and has encoded the prompt to exactly the intended tokens;
otherwise they come without logprobs, and sessions that collect for training refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from environments.sdk.errors import InferenceRefused
from environments.sdk.inference.sampling import Failover, OnTokens, Sample, Sampling, Split
from environments.sdk.inference.server import HttpServer, refuse_for_training

DEFAULT_MAX_TOKENS = 1024


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
        elsewhere: Failover = None,
        on_tokens: OnTokens | None = None,  # noqa: ARG002 - this kind does not stream here
    ) -> list[Sample]:
        if self.decode is None:
            refuse_for_training(self.config)
        reply = await self._ask(self.decode(prompt_tokens), sampling, split, elsewhere)
        trainable = reply.logprobs is not None and (reply.prompt_ids or [[]])[0] == prompt_tokens
        logprobs = reply.logprobs if trainable and reply.logprobs is not None else [[] for _ in reply.completion_ids]
        limit = sampling.max_tokens or DEFAULT_MAX_TOKENS
        return [
            Sample(tokens, known, "length" if len(tokens) >= limit else "stop", [])
            for tokens, known in zip(reply.completion_ids, logprobs, strict=True)
        ]

    async def _ask(self, prompt: str, sampling: Sampling, split: Split, elsewhere: Failover) -> TrlReply:
        more = sampling.more
        fields: dict[str, Any] = {
            "prompts": [prompt],
            "n": sampling.n,
            "repetition_penalty": more.get("repetition_penalty", 1.0),
            "temperature": sampling.temperature,
            "top_p": more.get("top_p", 1.0),
            "top_k": more.get("top_k", -1),
            "min_p": more.get("min_p", 0.0),
            "max_tokens": sampling.max_tokens or DEFAULT_MAX_TOKENS,
        }
        url = f"{self.config.base_url.rstrip('/')}/generate/"
        body = await self.channel.post(url, msgspec.json.encode(fields), split, elsewhere=elsewhere)
        try:
            return msgspec.json.decode(body, type=TrlReply)
        except msgspec.ValidationError as error:
            raise InferenceRefused(f"{url} answered something unexpected: {error}") from error
