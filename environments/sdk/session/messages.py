"""Messages of a chat as sessions take them: plain dictionaries whose content is text, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.sdk.errors import RequestRefused

TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the field that holds it."""


def read_messages(messages: Sequence[Any], *, other_parts: bool = False) -> list[dict[str, Any]]:
    """The messages with text for content, for templates concatenate it: parts joined by newlines, nothing for null.

    That is what vLLM's own route does. Parts that are no text are refused, or written as JSON where `other_parts`.
    """
    if not messages:
        raise RequestRefused("messages is empty: a chat needs one message at least", param="messages")
    return [_read(message, f"messages[{index}]", other_parts) for index, message in enumerate(plain_messages(messages))]


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as dictionaries, whichever library's objects they are."""
    return [_plain(message, index) for index, message in enumerate(messages)]


def text_of(content: Any) -> str:
    """The text of a message's content, given as text or as OpenAI's list of parts."""
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
        raise RequestRefused(f"messages[{index}] is no message: {message!r:.80}", param=f"messages[{index}]")
    dumped: dict[str, Any] = message.model_dump()
    return {name: value for name, value in dumped.items() if value is not None or name == "content"}


def _read(message: dict[str, Any], where: str, other_parts: bool) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where} has no role: {message!r:.80}", param=where)
    for call in message.get("tool_calls") or ():
        _check_call(call, where)
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
        text = part if isinstance(part, str) else part.get(TEXT_KINDS.get(kind, "")) if kind is not None else None
        if not isinstance(text, str):
            raise RequestRefused(
                f"{where}.content has a part of another kind than text ({kind or type(part).__name__}); "
                "a session takes text alone",
                param=where,
            )


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else getattr(call, "function", None)
    name = function.get("name") if isinstance(function, Mapping) else getattr(function, "name", None)
    if not isinstance(name, str):
        raise RequestRefused(f"{where} has a tool call without function.name: {call!r:.80}", param=where)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get(TEXT_KINDS.get(part.get("type", "text"), "")) if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else _as_json(part)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
