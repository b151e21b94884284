"""`ReasoningConfig` of Atropos: how much thinking is asked of providers, as environments build it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args
from urllib.parse import urlsplit

from environments.sdk.config import ReasoningEffort
from environments.sdk.inference.reasoning import OPENAI_HOST, TOKENS_BY_EFFORT, Reasoning

EFFORTS = get_args(ReasoningEffort)


@dataclass
class ReasoningConfig:
    """An effort or a number of tokens turns it on."""

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        str(effort): tokens for effort, tokens in TOKENS_BY_EFFORT.items()
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise ValueError(f"Invalid reasoning_effort: {self.effort}; it is one of {', '.join(EFFORTS)}")
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """What an environment's configuration asks for."""
        return cls(
            enabled=bool(getattr(env_config, "thinking_mode", False)),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """The fields of a request that ask for it; OpenAI's own models know an effort alone, and others one of both."""
        if not self.enabled:
            return None
        if urlsplit(base_url or "").hostname == OPENAI_HOST:
            return {"reasoning_effort": self.effort or "medium"}
        if self.effort is not None:
            amount: dict[str, Any] = (
                {"max_tokens": self.EFFORT_TO_MAX_TOKENS[self.effort]} if use_max_tokens else {"effort": self.effort}
            )
        else:
            amount = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"reasoning": {"enabled": True, **amount}}

    def as_reasoning(self) -> Reasoning:
        """The same for our servers."""
        return Reasoning(self.enabled, cast("ReasoningEffort | None", self.effort), self.max_tokens)
