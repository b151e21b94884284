"""What is asked of an inference server for one prompt, and whether a trainer can recompute its distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from environments.sdk.errors import RequestRefused, SamplingNotTrainable

LENGTH_NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")
# Arguments of OpenAI's library about the call itself; no server is told them.
OPENAI_ONLY = frozenset({"split", "skip_reasoning", "extra_body", "extra_headers", "extra_query", "timeout", "stream"})
# Fields of its chat API that say nothing about which tokens are sampled.
CHAT_ONLY = frozenset(
    {"user", "metadata", "store", "top_logprobs", "parallel_tool_calls", "stream_options", "service_tier", "reasoning"}
    | {"reasoning_effort", "modalities", "prompt_cache_key", "safety_identifier", "verbosity", "echo", "best_of"}
)
NOT_SENT = OPENAI_ONLY | CHAT_ONLY | {"model", "logprobs", "n", "temperature", "stop", *LENGTH_NAMES}

# Fields that change the distribution sampled from, with the values that leave it alone.
TRUNCATING: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
}
UNSENT = (None, {"type": "text"})  # the last is what `response_format` asks for by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters by vLLM's names; `more` holds those that need no handling here."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Sampling:
        """From the keyword arguments of an OpenAI-style call; the three names of the length limit mean the same."""
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
        """The fields of a `/generate` request."""
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
        """The same for `n` of the samples, from number `first` on: where a seed is given, each part gets its own.

        A server counts on from the seed within a request; parts under one seed would repeat each other's samples.
        """
        if n == self.n:
            return self
        seed = self.more.get("seed")
        more = self.more if seed is None or not first else {**self.more, "seed": int(seed) + first}
        return replace(self, n=n, more=more)

    def cut_at_stop(self, text: str) -> str:
        """The text before the first stop string: the tokens include it, the answer does not unless asked to."""
        if not self.stop or self.more.get("include_stop_str_in_output"):
            return text
        ends = [found for stop in self.stop if stop and (found := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def truncations(self) -> list[str]:
        """Names of the given fields that make the sampled distribution another than the model's own."""
        return [name for name, neutral in TRUNCATING.items() if name in self.more and self.more[name] not in neutral]

    def generation_params(self) -> dict[str, Any]:
        """What a group tells the trainer of how it was sampled."""
        params: dict[str, Any] = {"temperature": self.temperature}
        truncations = self.truncations()
        if truncations:
            params |= {name: self.more[name] for name in truncations}
            params["truncated_sampling"] = True
        return params

    def require_trainable(self, *, allow_truncated: bool) -> None:
        """Refuse what the trainer cannot recompute: greedy decoding always, truncated sampling unless allowed."""
        if self.temperature <= 0:
            raise SamplingNotTrainable(
                f"temperature {self.temperature:g} has no logprobs to train on; sample with a temperature above 0, "
                "mark the call split='eval' (over HTTP by the header X-Atropos-Split: eval), or let "
                "--env.session_temperature 1 replace what agents ask for"
            )
        truncations = self.truncations()
        if truncations and not allow_truncated:
            given = ", ".join(f"{name}={self.more[name]!r}" for name in truncations)
            raise SamplingNotTrainable(
                f"{given}: the trainer recomputes the model's whole distribution, not a truncated one; "
                "leave it out, or set --env.allow_truncated_sampling to train on it with importance weights"
            )


def count_of(kwargs: Mapping[str, Any]) -> int:
    """The number of samples asked for, one where nothing is said."""
    n = kwargs.get("n")
    if n is not None and int(n) < 1:
        raise RequestRefused(f"n is {n}: one sample is the least", param="n")
    return 1 if n is None else int(n)
