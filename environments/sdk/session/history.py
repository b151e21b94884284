"""Messages of a chat compared with those of a sequence: what says that a request continues what was sampled."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.sdk.session.messages import text_of

Key = frozenset[Hashable]
"""The ways a message may be recognised; two messages are the same when they share one."""

PREFILL_END = "\ue002"


def placeholder(index: int) -> str:
    """Stands for a sampled message while a chat is rendered: no template trims or rewrites it."""
    return f"\ue000{index}\ue001"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat that a sequence holds, down to the assistant's message sampled last."""

    messages: tuple[dict[str, Any], ...]
    keys: tuple[Key, ...]
    sampled_at: tuple[int, ...]
    """Which of the messages were sampled in this sequence."""
    prompt_text: str
    """The chat as rendered up to where the last sample begins, earlier samples as placeholders."""

    def is_continued_by(self, keys: Sequence[Key], *, open_end: bool) -> bool:
        """Whether a chat with these keys begins with this one and adds to it, or leaves its last message open."""
        count = len(self.keys)
        if len(keys) < count or (len(keys) == count and not open_end):
            return False
        return all(not self.keys[i].isdisjoint(keys[i]) for i in range(count - 1, -1, -1))

    def has_sampled_after(self, keys: Sequence[Key], index: int) -> bool:
        """Whether the message at `index` was sampled here, after the very messages that these keys begin with."""
        return index in self.sampled_at and all(not self.keys[i].isdisjoint(keys[i]) for i in range(index))

    def with_placeholders(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """These messages with the sampled ones replaced by what stands for their tokens."""
        sampled = self.sampled_at
        return [
            {"role": "assistant", "content": placeholder(index)} if index in sampled else message
            for index, message in enumerate(messages)
        ]


def key_of(message: Mapping[str, Any]) -> Key:
    """A message by role and text; one with tool calls by their ids, or by what is called where ids were lost."""
    role = message.get("role")
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        return frozenset({(role, "ids", *map(_call_id, calls)), (role, "calls", *map(_called, calls))})
    return frozenset({(role, text_of(message.get("content")), message.get("tool_call_id"))})


def _call_id(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else call.id


def _called(call: Any) -> tuple[Any, Any]:
    function = call["function"] if isinstance(call, Mapping) else call.function
    if not isinstance(function, Mapping):
        return function.name, function.arguments
    arguments = function.get("arguments")
    return function.get("name"), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
