"""The messages of a row's chat, in the form that chat templates read.

A message has role and content, or `from` and `value`, as in data of ShareGPT's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.rewards.protocol import reference_text
from environments.tasks.records import DataUnusable

SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""The roles of ShareGPT's speakers."""


def read_chat(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the messages of a chat, each with role and content; raise `DataUnusable` for anything else."""
    messages: list[Any] = [_with_role(message, where) for message in value] if isinstance(value, Sequence) else [None]
    if not all(
        isinstance(message, Mapping)
        and message.get("role")
        and (message.get("content") is not None or message.get("tool_calls"))
        for message in messages
    ):
        raise DataUnusable(f"{where}: a prompt is text or a list of messages with role and content, not {value!r:.80}")
    # A message that only calls tools may lack a content, and templates differ in whether they ask for it.
    return [without_nulls({**message, "content": message.get("content") or ""}) for message in messages]


def reply_message(value: Any, where: str) -> Mapping[str, Any] | None:
    """Return the assistant's message in a reply's cell, a message or a list of one; None for a cell of other content.

    It keeps all that a chat template may use of it, such as tool calls and thoughts. Its content is text.
    """
    message = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if not _is_message(message):
        return None
    read = read_chat([message], where)
    return {**read[0], "role": "assistant", "content": reference_text(read)}


def _is_message(value: Any) -> bool:
    """Return True for a message of a known form with anything in it."""
    if not isinstance(value, Mapping):
        return False
    if value.get("role"):
        return bool(value.get("content") or value.get("tool_calls"))
    return str(value.get("from")) in SPEAKERS and bool(value.get("value"))


def _with_role(message: Any, where: str) -> Any:
    """Return a message of ShareGPT's form, which has the keys `from` and `value`, with role and content."""
    if not isinstance(message, Mapping) or message.get("role") or "from" not in message:
        return message
    role = SPEAKERS.get(str(message["from"]))
    if role is None:
        raise DataUnusable(
            f"{where}: a message is from {message['from']!r}, and the roles of {', '.join(SPEAKERS)} alone are known; "
            "rename it, or leave the row out"
        )
    return {"role": role, "content": message.get("value")}


def without_nulls(value: Any) -> Any:
    """Return a message without the keys that are null: Parquet gives each the keys of all, and chat templates ask only
    which keys a message has.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
