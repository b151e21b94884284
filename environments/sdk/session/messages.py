"""Chat messages: a request's messages are checked, and compared with the chat of a sequence.

`read_messages` checks messages one by one and makes them plain dictionaries whose content is text. `Conversation` is
the chat that a sequence holds: it decides whether a request continues what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.sdk.errors import RequestRefused

TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The kinds of content parts that are text, and the field that holds it."""


def read_messages(messages: Sequence[Any], *, other_parts: bool = False) -> list[dict[str, Any]]:
    """Return the messages with text content, since chat templates concatenate it: parts joined by newlines, null as "".

    vLLM's own route does the same. Parts that are not text are refused, or written as JSON if `other_parts`.
    """
    if not messages:
        raise RequestRefused("messages is empty; a chat needs at least one message", param="messages")
    return [_read(message, f"messages[{index}]", other_parts) for index, message in enumerate(plain_messages(messages))]


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as dictionaries, whichever library's objects they are."""
    return [_plain(message, index) for index, message in enumerate(messages)]


def text_of(content: Any) -> str:
    """Return the text of a message's content, given as text or as OpenAI's list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        return "\n".join(_text_of_part(part) for part in content)
    return _as_json(content)


def _plain(message: Any, index: int) -> dict[str, Any]:
    if isinstance(message, dict):
        return message
    if isinstance(message, Mapping):
        return dict(message)
    if not hasattr(message, "model_dump"):
        raise RequestRefused(f"messages[{index}] is not a message: {message!r:.80}", param=f"messages[{index}]")
    dumped: dict[str, Any] = message.model_dump()
    return {name: value for name, value in dumped.items() if value is not None or name == "content"}


def _read(message: dict[str, Any], where: str, other_parts: bool) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where} has no role: {message!r:.80}", param=where)
    calls = message.get("tool_calls") or ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise RequestRefused(f"{where}.tool_calls is not a list: {calls!r:.80}", param=where)
    for call in calls:
        _check_call(call, where)
    _require_id(message.get("tool_call_id"), f"{where}.tool_call_id")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if not other_parts:
        _require_text(content, where)
    return {**message, "content": text_of(content)}


def _require_text(content: Any, where: str) -> None:
    if content is not None and not isinstance(content, list):
        raise RequestRefused(f"{where}.content is neither text nor a list of parts: {content!r:.80}", param=where)
    for part in content or ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get(TEXT_KINDS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise RequestRefused(
                f"{where}.content has a part of another kind than text ({kind or type(part).__name__}); "
                "a session takes only text",
                param=where,
            )


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else getattr(call, "function", None)
    name = function.get("name") if isinstance(function, Mapping) else getattr(function, "name", None)
    if not isinstance(name, str):
        raise RequestRefused(f"{where} has a tool call without function.name: {call!r:.80}", param=where)
    _require_id(_call_id(call), f"{where}.tool_calls")


def _require_id(value: Any, where: str) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestRefused(f"{where}: an id is a text, not {value!r:.80}", param=where)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get(TEXT_KINDS.get(str(part.get("type", "text")), "")) if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else _as_json(part)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


Key = frozenset[Hashable]
"""Alternative identities of a message; two messages are the same if they share one."""

PREFILL_END = "\ue002"


def placeholder(index: int) -> str:
    """Return the placeholder for a sampled message while a chat is rendered: no template trims or rewrites it."""
    return f"\ue000{index}\ue001"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat of a sequence: its messages up to and including the assistant's message sampled last."""

    messages: tuple[dict[str, Any], ...]
    keys: tuple[Key, ...]
    sampled_at: tuple[int, ...]
    """Indices of the messages that were sampled in this sequence."""
    prompt_text: str
    """The rendered chat up to the beginning of the last sample, with placeholders for earlier samples."""

    def is_continued_by(self, keys: Sequence[Key], *, open_end: bool) -> bool:
        """Return True if a chat with these keys begins with this one and has more messages.

        With `open_end` (the request ends in an assistant message to be completed) as many messages are enough.
        """
        count = len(self.keys)
        if len(keys) < count or (len(keys) == count and not open_end):
            return False
        return all(not self.keys[i].isdisjoint(keys[i]) for i in range(count - 1, -1, -1))

    def shared_identities(self, keys: Sequence[Key]) -> int:
        """Return how many identities the messages share with a chat that continues this one: of several samples with
        the same tool calls, the one that the chat answers shares most.
        """
        return sum(len(own & given) for own, given in zip(self.keys, keys, strict=False))

    def has_sampled_after(self, keys: Sequence[Key], index: int) -> bool:
        """Return True if the message at `index` was sampled here, after the messages that these keys begin with."""
        return index in self.sampled_at and all(not self.keys[i].isdisjoint(keys[i]) for i in range(index))

    def with_placeholders(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return these messages with placeholders in the place of the sampled ones."""
        sampled = self.sampled_at
        return [
            {"role": "assistant", "content": placeholder(index)} if index in sampled else message
            for index, message in enumerate(messages)
        ]


def key_of(message: Mapping[str, Any]) -> Key:
    """Return a message's key: role and text; with tool calls their ids, or names and arguments if the ids were lost.

    The calls with the text distinguish two samples with the same calls; clients may leave the text out.
    """
    role = message.get("role")
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        called, text = tuple(map(_called, calls)), text_of(message.get("content"))
        return frozenset(
            {(role, "ids", *map(_call_id, calls)), (role, "calls", *called), (role, "calls after", text, *called)}
        )
    return frozenset({(role, text_of(message.get("content")), message.get("tool_call_id"))})


def _call_id(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else getattr(call, "id", None)


def _called(call: Any) -> tuple[Any, Any]:
    function = call["function"] if isinstance(call, Mapping) else call.function
    if not isinstance(function, Mapping):
        return function.name, function.arguments
    arguments = function.get("arguments")
    return function.get("name"), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
