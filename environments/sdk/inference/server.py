"""What the servers of every kind share: one channel, and what the pool wants to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceRefused, TokensUnavailable
from environments.sdk.inference.channel import Channel, Elsewhere
from environments.sdk.inference.generation import OnTokens, PromptLogprobs, Sample, Split
from environments.sdk.inference.reasoning import Reasoning
from environments.sdk.inference.sampling import OPENAI_ONLY, Sampling
from environments.sdk.inference.transport import Transport


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """The newest policy where a plain server has each version under a name of its own, as the broker tells it."""

    name: str
    version: int | None


class HttpServer:
    """One server over HTTP; the kinds differ in `generate`."""

    def __init__(
        self, config: APIServerConfig, *, wait_timeout_seconds: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.config = config
        self.channel = Channel(config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
        self.reasoning = Reasoning()
        self.policy: NamedPolicy | None = None
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
        elsewhere: Elsewhere = None,  # noqa: ARG002
        on_tokens: OnTokens | None = None,  # noqa: ARG002
    ) -> list[Sample]:
        refuse_for_training(self.config)

    async def prompt_logprobs(
        self,
        prompt_tokens: list[int],  # noqa: ARG002 - the interface of the kinds that can
        top_k: int,  # noqa: ARG002
        split: Split,  # noqa: ARG002
        *,
        elsewhere: Elsewhere = None,  # noqa: ARG002
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
        elsewhere: Elsewhere = None,
    ) -> dict[str, Any]:
        """The server's own chat completion, in OpenAI's form."""
        fields = _openai_fields(kwargs, {"messages": messages, "model": self.model_name})
        if not kwargs.get("skip_reasoning"):
            fields = self.reasoning.applied(fields, self.config.base_url)
        return await self._post(f"{self.config.base_url.rstrip('/')}/chat/completions", fields, split, elsewhere)

    async def complete(
        self, prompt: str, kwargs: dict[str, Any], split: Split, *, elsewhere: Elsewhere = None
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

    async def _get_object(self, url: str, elsewhere: Elsewhere = None) -> dict[str, Any]:
        """The JSON object there; an empty one from a server that has none."""
        try:
            return msgspec.json.decode(await self.channel.get(url, elsewhere=elsewhere) or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return {}

    async def _post(self, url: str, fields: dict[str, Any], split: Split, elsewhere: Elsewhere) -> dict[str, Any]:
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
