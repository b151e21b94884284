"""Chat and text completions: they have the attributes of OpenAI's objects, without that library's cost per rollout."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from environments.sdk.tools import FunctionCall, ToolCall

REASONING_NAMES = ("reasoning_content", "reasoning")
"""Names that providers give to thoughts apart from the content."""

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})


@dataclass(slots=True)
class AssistantMessage:
    content: str | None
    role: str = "assistant"
    tool_calls: list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """Thoughts that a provider returns apart from the content; a next request does not repeat them."""

    @property
    def reasoning(self) -> str | None:
        """The same, by the other name that providers give it."""
        return self.reasoning_content

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the message to put into the next request."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call if isinstance(call, dict) else call.model_dump() for call in self.tool_calls]
        return message


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0

    def __post_init__(self) -> None:
        self.total_tokens = self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatChoice:
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None


@dataclass(slots=True)
class TextChoice:
    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None


@dataclass(slots=True)
class ChatCompletion:
    choices: list[ChatChoice]
    usage: Usage
    model: str = "default"
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Completion:
    choices: list[TextChoice]
    usage: Usage
    model: str = "default"
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    object: str = "text_completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token: its text and its logprob."""

    text: str
    logprob: float


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice. A token that is part of a character has no text, so no bytes either."""
    entries = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": entries, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], *, offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` of a text completion's choice; `offset` is the position of its first token in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def openai_document(answer: ChatCompletion | Completion) -> dict[str, Any]:
    """Return the answer as a JSON document, with finish reasons that OpenAI's objects know."""
    document = answer.model_dump()
    for choice in document["choices"]:
        choice["finish_reason"] = openai_finish_reason(choice["finish_reason"])
        message = choice.get("message", {})
        if message.get("reasoning_content", "") is None:  # OpenAI's own answers have no such field
            del message["reasoning_content"]
    return document


def openai_finish_reason(reason: str) -> str:
    return reason if reason in FINISH_REASONS else "stop"  # an aborted or unknown end


def read_openai_chat(answer: Mapping[str, Any]) -> ChatCompletion:
    """Read the chat completion that a server with OpenAI's API answered."""
    choices = [
        ChatChoice(
            index=int(choice.get("index", index)),
            message=_read_message(choice.get("message") or {}),
            finish_reason=choice.get("finish_reason") or "stop",
        )
        for index, choice in enumerate(_items(answer, "choices"))
    ]
    return ChatCompletion(choices, _read_usage(answer), model=str(answer.get("model", "default")))


def read_openai_completion(answer: Mapping[str, Any]) -> Completion:
    """Read the text completion that a server with OpenAI's API answered."""
    choices = [
        TextChoice(int(choice.get("index", index)), choice.get("text") or "", choice.get("finish_reason") or "stop")
        for index, choice in enumerate(_items(answer, "choices"))
    ]
    return Completion(choices, _read_usage(answer), model=str(answer.get("model", "default")))


def _read_message(message: Mapping[str, Any]) -> AssistantMessage:
    calls = [
        ToolCall(FunctionCall(call["function"]["name"], call["function"]["arguments"]), id=call["id"])
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content")
    thoughts = (message.get(name) for name in REASONING_NAMES)
    return AssistantMessage(
        content if calls else content or "",
        tool_calls=calls or None,
        reasoning_content=next((text for text in thoughts if isinstance(text, str)), None),
    )


def _read_usage(answer: Mapping[str, Any]) -> Usage:
    usage = answer.get("usage") or {}
    return Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))


def _items(answer: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = answer.get(name)
    return found if isinstance(found, list) else []
