"""A rollout as messages to read: the chat that its session held, or its text cut where the model began to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from environments.sdk.session.nodes import NOT_TRAINED, SequenceNode

Decode = Callable[[list[int]], str]


def messages_of(
    node: SequenceNode | None, tokens: Sequence[int], mask: Sequence[int], decode: Decode
) -> list[dict[str, Any]]:
    """The messages of one rollout; what was sampled is the assistant's, all else the user's where no chat tells."""
    chat = node.conversation if node is not None else None
    if chat is not None:
        return [dict(message) for message in chat.messages]
    parts = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1] != NOT_TRAINED)
    turns = (("assistant" if trained else "user", [token for token, _ in pairs]) for trained, pairs in parts)
    return [{"role": role, "content": decode(ids)} for role, ids in turns]
