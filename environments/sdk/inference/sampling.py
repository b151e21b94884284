"""Sampling types: requests to inference servers and their samples have one form for every kind of server.

`Sampling` holds the parameters of one prompt and decides whether a trainer can recompute their distribution. `Sample`
and `PromptLogprobs` are results, `InferenceServer` is the interface of servers, and `Reasoning` asks reasoning models
behind a chat route for an amount of thinking, in the fields that each provider knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from atropos_api.common.sampling_values import LEAST_TEMPERATURE, WHOLE_DISTRIBUTION
from atropos_api.wire.groups import Span
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ReasoningEffort
from environments.sdk.errors import RequestRefused, SamplingNotTrainable

LENGTH_NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")

# Arguments of OpenAI's library about the call itself; no server gets them.
OPENAI_ONLY = frozenset({"split", "skip_reasoning", "extra_body", "extra_headers", "extra_query", "timeout", "stream"})

# Fields of OpenAI's chat API that do not change which tokens are sampled.
CHAT_ONLY = frozenset(
    {"user", "metadata", "store", "top_logprobs", "parallel_tool_calls", "stream_options", "service_tier", "reasoning"}
    | {"reasoning_effort", "modalities", "prompt_cache_key", "safety_identifier", "verbosity", "echo", "best_of"}
)

NOT_SENT = OPENAI_ONLY | CHAT_ONLY | {"model", "logprobs", "n", "temperature", "stop", *LENGTH_NAMES}

# Fields that change the sampled distribution, with the values that do not change it.
TRUNCATING: Mapping[str, tuple[Any, ...]] = {
    **{name: (value, None) for name, value in WHOLE_DISTRIBUTION.items()},
    "top_k": (0, -1, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
}

# Those that only forbid tokens: with a sampling mask the trainer recomputes the same distribution. `min_tokens` and
# `bad_words` forbid so few tokens that the allowed ones are too many for a mask.
NARROWING = frozenset({"top_p", "top_k", "min_p", "allowed_token_ids"})
MASKING = NARROWING | {"min_tokens", "bad_words"}

NO_TURN_BEFORE: Mapping[str, Any] = {}

UNSENT = (None, {"type": "text"})  # the last is the default of `response_format`


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters by vLLM's names: `more` holds those that need no handling here."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    mask_limit: int = 0
    """Most tokens of a sampling mask that the server is asked for; 0: none."""

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Sampling:
        """Build it from the keyword arguments of an OpenAI-style call; the length limit may have any of three names."""
        kwargs = {**kwargs, **(kwargs.get("extra_body") or {})} if "extra_body" in kwargs else kwargs
        limit = next((kwargs[name] for name in LENGTH_NAMES if kwargs.get(name) is not None), None)
        stop = kwargs.get("stop") or ()
        temperature = kwargs.get("temperature")
        return cls(
            n=count_of(kwargs),
            temperature=1.0 if temperature is None else float(temperature),
            max_tokens=limit,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            more={name: value for name, value in kwargs.items() if name not in NOT_SENT and value not in UNSENT},
        )

    def payload(self) -> dict[str, Any]:
        """Return the fields of a `/generate` request."""
        fields: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.more,
        }
        if self.stop:
            fields["stop"] = list(self.stop)
        return fields

    def part(self, n: int, *, first: int = 0) -> Sampling:
        """Return the parameters for `n` of the samples, from number `first` on; with a seed, each part gets its own.

        A server counts up from the seed within a request; parts with the same seed would repeat each other's samples.
        """
        if n == self.n:
            return self
        seed = self.more.get("seed")
        more = self.more if seed is None or not first else {**self.more, "seed": int(seed) + first}
        return replace(self, n=n, more=more)

    def cut_at_stop(self, text: str) -> str:
        """Return the text before the first stop string: the tokens include it, the answer only if requested."""
        if not self.stop or self.more.get("include_stop_str_in_output"):
            return text
        ends = [found for stop in self.stop if stop and (found := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def truncations(self) -> list[str]:
        """Return the names of given fields that make the sampled distribution differ from the model's own."""
        return [name for name, neutral in TRUNCATING.items() if name in self.more and self.more[name] not in neutral]

    def with_masks(self, limit: int) -> Sampling:
        """Return the parameters with sampling masks of at most `limit` tokens, if these make the ratio exact."""
        return replace(self, mask_limit=limit) if masks_suffice(self.truncations()) else self

    def generation_params(self, before: Mapping[str, Any] = NO_TURN_BEFORE) -> dict[str, Any]:
        """Return the sampling parameters that a group reports to the trainer; `before` are those of the sequence's
        earlier turns.
        """
        params: dict[str, Any] = {**before, "temperature": self.temperature}
        truncations = self.truncations()
        params |= {name: self.more[name] for name in truncations}
        if truncations or self._changes_temperature(before):
            params["truncated_sampling"] = True
        return params

    def _changes_temperature(self, before: Mapping[str, Any]) -> bool:
        return bool(before.get("temperature", self.temperature) != self.temperature)

    def require_trainable(self, *, allow_truncated: bool, before: Mapping[str, Any] = NO_TURN_BEFORE) -> None:
        """Raise for sampling that the trainer cannot recompute: greedy sampling, and truncated unless it is allowed.

        So is another temperature than that of the sequence's earlier turns (`before`).
        """
        if self.temperature < LEAST_TEMPERATURE:
            raise SamplingNotTrainable(
                f"temperature {self.temperature:g} has no logprobs to train on (vLLM samples at {LEAST_TEMPERATURE:g} "
                f"instead of less); sample at {LEAST_TEMPERATURE:g} or above, mark the call split='eval' (over HTTP by "
                "the header X-Atropos-Split: eval), or let --env.session_temperature 1 replace the agents' temperature"
            )
        if self._changes_temperature(before) and not allow_truncated:
            raise SamplingNotTrainable(
                f"temperature {self.temperature:g} continues a sequence that was sampled at {before['temperature']:g}, "
                "and the trainer recomputes each sequence at one temperature; keep it, let --env.session_temperature 1 "
                "replace those of agents, or set --env.allow_truncated_sampling to train on it with importance weights"
            )
        truncations = self.truncations()
        if truncations and not allow_truncated:
            given = ", ".join(f"{name}={self.more[name]!r}" for name in truncations)
            masks = " (and --env.sampling_mask_limit for exact ratios)" if masks_suffice(truncations) else ""
            raise SamplingNotTrainable(
                f"{given}: the trainer recomputes the model's whole distribution, not a truncated one; "
                f"leave it out, or set --env.allow_truncated_sampling to train on it with importance weights{masks}"
            )


def masks_suffice(truncations: Iterable[str]) -> bool:
    """Return True if the trainer can recompute a distribution with these truncations from sampling masks."""
    names = frozenset(truncations)
    return names <= MASKING and not names.isdisjoint(NARROWING)


def count_of(kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples requested; the default is one."""
    n = kwargs.get("n")
    if n is not None and int(n) < 1:
        raise RequestRefused(f"n is {n}; it must be at least 1", param="n")
    return 1 if n is None else int(n)


Split = Literal["train", "eval"]

OnTokens = Callable[[int, list[int], list[float]], None]
"""Callback that gets a sample's number and its next tokens and logprobs, while the server continues sampling."""


@dataclass(slots=True)
class Sample:
    """One completion: its tokens are exactly those that came back, never text encoded again."""

    tokens: list[int]
    logprobs: list[float]
    """One per token; empty if the server returns none, and then the sample cannot be trained on."""
    finish_reason: str
    versions: list[Span]
    """Spans over `tokens` alone, counted from 0; empty if the server returns none."""
    sampling_masks: list[list[int]] | None = None
    """For each token those that could be drawn, empty where they were too many; None if the server returns none."""
    reasoning: str | None = None
    """Thoughts that a provider of text returned apart from the answer."""


@dataclass(slots=True)
class PromptLogprobs:
    """Logprobs of each token of a given text: the first position has no entries."""

    prompt_tokens: list[int]
    token_ids: list[list[int]]
    """At each position the most likely tokens, best first; the given token alone if none were requested."""
    logprobs: list[list[float]]
    given: list[float | None]
    """The logprob of the given token at each position; None if the server does not tell it."""

    def as_mapping(self) -> dict[str, Any]:
        """Return the logprobs by the original Atropos' names, and the given tokens' own as `prompt_logprobs`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_topk_token_ids": self.token_ids,
            "prompt_topk_logprobs": self.logprobs,
            "prompt_logprobs": self.given,
        }


class InferenceServer(Protocol):
    """Interface of one server, or several as one: it samples from prompts of tokens."""

    @property
    def config(self) -> APIServerConfig: ...

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: Sampling,
        split: Split,
        *,
        failover: Failover = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample from a prompt of tokens; raise `TokensUnavailable` if the server returns no tokens.

        A server that streams calls `on_tokens` as tokens come; another server never calls it.
        """
        ...

    async def prompt_logprobs(
        self, prompt_tokens: list[int], top_k: int, split: Split, *, failover: Failover = None
    ) -> PromptLogprobs:
        """Return the logprobs of the prompt itself."""
        ...


TOKENS_BY_EFFORT: Mapping[ReasoningEffort, int] = {
    "none": 1024,
    "minimal": 3200,
    "low": 6400,
    "medium": 16000,
    "high": 25600,
    "xhigh": 30400,
}

OPENAI_HOST = "api.openai.com"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Amount of thinking to request: an effort wins over a number of tokens, and either enables it."""

    enabled: bool = False
    effort: ReasoningEffort | None = None
    max_tokens: int | None = None

    @classmethod
    def from_config(cls, config: BaseEnvConfig) -> Reasoning:
        asked = config.thinking_mode or config.reasoning_effort is not None or config.max_reasoning_tokens is not None
        return cls(asked, config.reasoning_effort, config.max_reasoning_tokens)

    def applied(self, fields: dict[str, Any], base_url: str) -> dict[str, Any]:
        """Return a chat request's fields with reasoning requested; a field that the request sets is kept."""
        if not self.enabled:
            return fields
        if urlsplit(base_url).hostname == OPENAI_HOST:
            return self._for_openai(fields)
        amount: dict[str, Any] = {}
        if self.effort is not None:
            amount = {"effort": self.effort}
        elif self.max_tokens is not None:
            amount = {"max_tokens": self.max_tokens}
        return {"reasoning": {"enabled": True, **amount}, **fields}

    def _for_openai(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Adapt a request to OpenAI's own models: an effort, temperature 1 and the newer name of the length limit."""
        changed = {"reasoning_effort": self._nearest_effort(), **fields, "temperature": 1.0}
        if "max_tokens" in changed:
            limit = changed.pop("max_tokens")
            changed.setdefault("max_completion_tokens", limit)
        return changed

    def _nearest_effort(self) -> ReasoningEffort:
        if self.effort is not None:
            return self.effort
        if self.max_tokens is None:
            return "medium"
        wanted = self.max_tokens
        return min(TOKENS_BY_EFFORT, key=lambda effort: abs(TOKENS_BY_EFFORT[effort] - wanted))


Failover = Callable[[], bool] | None
"""Callback that returns True if another server could take the request; None if it must stay with this one."""
