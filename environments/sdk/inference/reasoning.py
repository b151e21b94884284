"""What is asked of reasoning models behind a chat route: how hard to think, in the words each provider knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from environments.sdk.config import BaseEnvConfig, ReasoningEffort

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
    """How much thinking to ask for; an effort wins over a number of tokens, and either turns it on."""

    enabled: bool = False
    effort: ReasoningEffort | None = None
    max_tokens: int | None = None

    @classmethod
    def from_config(cls, config: BaseEnvConfig) -> Reasoning:
        asked = config.thinking_mode or config.reasoning_effort is not None or config.max_reasoning_tokens is not None
        return cls(asked, config.reasoning_effort, config.max_reasoning_tokens)

    def applied(self, fields: dict[str, Any], base_url: str) -> dict[str, Any]:
        """A chat request with reasoning asked for; what the request says itself stays."""
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
        """OpenAI's own models take an effort, no other temperature than 1 and the newer name of the length limit."""
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
