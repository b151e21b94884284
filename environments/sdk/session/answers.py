"""Chat and text completions with the attributes of OpenAI's objects, without that library's cost a rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class AssistantMessage:
    content: str
    role: str = "assistant"
    tool_calls: list[Any] | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatChoice:
    index: int
    message: AssistantMessage
    finish_reason: str


@dataclass(slots=True)
class TextChoice:
    index: int
    text: str
    finish_reason: str


@dataclass(slots=True)
class ChatCompletion:
    choices: list[ChatChoice]
    usage: Usage
    model: str = "default"
    id: str = "chatcmpl-managed"
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Completion:
    choices: list[TextChoice]
    usage: Usage
    model: str = "default"
    id: str = "cmpl-managed"
    object: str = "text_completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


def read_openai_chat(answer: Mapping[str, Any]) -> ChatCompletion:
    """The chat completion that a foreign server answered."""
    choices = [
        ChatChoice(
            index=int(choice.get("index", index)),
            message=AssistantMessage(
                content=choice["message"].get("content") or "", tool_calls=choice["message"].get("tool_calls")
            ),
            finish_reason=choice.get("finish_reason") or "stop",
        )
        for index, choice in enumerate(_items(answer, "choices"))
    ]
    usage = answer.get("usage") or {}
    counts = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    return ChatCompletion(choices, counts, model=str(answer.get("model", "default")))


def _items(answer: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = answer.get(name)
    return found if isinstance(found, list) else []
