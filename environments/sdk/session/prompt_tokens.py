"""Tokens of a call's prompt, by prefix matching: which sequence it continues, and which text is newly encoded.

The prompt is the tokens that the sequence already has, and the new part encoded. A chat is compared message by message.
The sampled messages are rendered as placeholders, so that the text between them is known even with a template that
trims answers or drops their thoughts; their tokens are used as they were sampled. Chats whose history differs from what
was sampled are counted by `DriftLog`, and the first one is logged with the place of the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.sdk.errors import RequestRefused
from environments.sdk.session.messages import (
    PREFILL_END,
    Conversation,
    Key,
    key_of,
    placeholder,
    plain_messages,
    read_messages,
    text_of,
)
from environments.sdk.session.tokens_and_masks import SequenceNode
from environments.sdk.tokenizer import Codec

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 40


class DriftLog:
    """Log of drifted chats, shared by an environment's sessions: only the first one is logged as a warning."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, sampled: str, given: str, why: str) -> None:
        self.count += 1
        level = logging.WARNING if self.count == 1 else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        at = first_difference(sampled, given)
        shown = slice(max(0, at - SHOWN_CHARACTERS // 2), at + SHOWN_CHARACTERS)
        logger.log(
            level,
            "a chat's next turn does not continue what was sampled: %s differs from character %d on, where %r was "
            "sampled and %r is given; it becomes a sequence of its own (logged once, counted as server/drifted_chats)",
            why,
            at,
            sampled[shown],
            given[shown],
        )


def first_difference(one: str, other: str) -> int:
    """Return the index where two texts first differ; the length of the shorter one if it is a prefix of the other."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


THINK_TAGS = ("<think>", "</think>")


@dataclass(slots=True)
class Prompt:
    """The prompt of a call: it names the sequence that it continues and its chat, if there are any."""

    tokens: list[int]
    text: str
    base: SequenceNode | None = None
    chat: Chat | None = None
    prompt_text: str = ""
    sampled_before: tuple[int, ...] = ()


@dataclass(slots=True)
class Chat:
    """A chat request: its messages and how they are rendered. An assistant's message at the end is to be continued."""

    messages: list[dict[str, Any]]
    given: Sequence[Any] = ()
    """The messages as the caller gave them, for a provider that reads more than text."""
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)

    @classmethod
    def read(
        cls, messages: Sequence[Any], tools: Any, options: Mapping[str, Any], *, other_parts: bool = False
    ) -> Chat:
        read = read_messages(messages, other_parts=other_parts)
        return cls(read, messages, tools, options, [key_of(message) for message in read])

    @property
    def as_given(self) -> list[dict[str, Any]]:
        return plain_messages(self.given)

    @property
    def open_end(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"

    @property
    def answered_at(self) -> int:
        """The index of the message that the answer belongs to: the open one at the end, or a new one."""
        return len(self.messages) - self.open_end

    @property
    def prefill(self) -> str:
        return text_of(self.messages[-1].get("content")) if self.open_end else ""

    def completed(self, content: str | None, tool_calls: Any, sampled_text: str, prompt: Prompt) -> Conversation:
        """Return the chat with an answer: the part that the client received, and the text that the model sampled."""
        answered_at, prefill = self.answered_at, self.prefill
        received = {"role": "assistant", "content": prefill + (content or ""), "tool_calls": tool_calls}
        sampled = prompt.sampled_before
        return Conversation(
            messages=(*self.messages[:answered_at], {"role": "assistant", "content": prefill + sampled_text}),
            keys=(*self.keys[:answered_at], key_of(received)),
            sampled_at=sampled if answered_at in sampled else (*sampled, answered_at),
            prompt_text=prompt.prompt_text,
        )

    def render(self, codec: Codec, messages: list[dict[str, Any]]) -> str:
        """Render messages with this chat's tools and options, up to the beginning of the answer."""
        if not self.open_end:
            return codec.render(messages, tools=self.tools, options=self.options, add_generation_prompt=True)
        last = {**messages[-1], "content": text_of(messages[-1].get("content")) + PREFILL_END}
        text = codec.render([*messages[:-1], last], tools=self.tools, options=self.options, add_generation_prompt=False)
        return text.partition(PREFILL_END)[0]


class PromptBuilder:
    """Builder of one session's prompts: each prompt continues the longest known sequence that fits."""

    def __init__(self, codec: Codec, drift: DriftLog, *, preserve_think_blocks: bool) -> None:
        self._codec = codec
        self._drift = drift
        self._preserve = preserve_think_blocks

    def for_chat(self, chat: Chat, known: Iterable[SequenceNode]) -> Prompt:
        """Return a chat's prompt; `known` is ordered by preference among equally long sequences."""
        known = list(known)
        candidates = [
            node
            for node in known
            if node.conversation is not None and node.conversation.is_continued_by(chat.keys, open_end=chat.open_end)
        ]
        base = max(candidates, key=lambda node: _closeness(node, chat), default=None)
        self._record_rewritten_message(chat, known, start=0 if base is None else _message_count(base))
        continued = self._try_to_continue(chat, base) if base is not None else None
        if continued is not None:
            return continued
        text = chat.render(self._codec, chat.messages)
        same_text = self._continue_text(text, known)
        if same_text is not None:
            return Prompt(same_text.tokens, text, same_text.base, chat, text)
        return Prompt(self._codec.encode_part(text), text, None, chat, text)

    def for_text(self, text: str, known: Iterable[SequenceNode]) -> Prompt:
        return self._continue_text(text, known) or Prompt(self._codec.encode(text), text)

    def for_tokens(self, tokens: list[int], known: Iterable[SequenceNode]) -> Prompt:
        """Return a prompt of given tokens; it continues the longest sequence that it begins with."""
        fitting = [node for node in known if tokens[: len(node.tokens)] == node.tokens]
        base = max(fitting, key=lambda node: len(node.tokens), default=None)
        return Prompt(list(tokens), self._codec.decode(tokens), base)

    def _try_to_continue(self, chat: Chat, base: SequenceNode) -> Prompt | None:
        """Return the prompt as `base` and what the template adds; None if the template changes or refuses that.

        A placeholder calls no tool, and some templates (Mistral's, gpt-oss's) refuse a tool's result without a call.
        """
        conversation = base.conversation
        assert conversation is not None
        try:
            return self._continue_chat(chat, base, conversation)
        except RequestRefused as error:
            self._drift.record(conversation.prompt_text, str(error), "the chat as its template renders it")
            return None

    def _continue_chat(self, chat: Chat, base: SequenceNode, conversation: Conversation) -> Prompt | None:
        if not self._preserve and self._has_thoughts(conversation):
            return self._continue_as_rendered(chat, base, conversation)
        text = chat.render(self._codec, conversation.with_placeholders(chat.messages))
        before, mark, tail = text.partition(placeholder(conversation.sampled_at[-1]))
        if not mark or not self._begins_alike(chat, conversation, before):
            self._drift.record(conversation.prompt_text, before, "the chat as its template renders it")
            return None
        if base.ended and not tail:
            return None  # this answer is to be continued, but tokens sampled after its end token would not belong to it
        still_open = chat.open_end and len(chat.keys) == len(conversation.keys)
        return Prompt(
            base.tokens + self._tail_tokens(base, tail),
            base.full_text + self._without_end(base, tail),
            base,
            chat,
            before if still_open else text,
            conversation.sampled_at,
        )

    def _continue_as_rendered(self, chat: Chat, base: SequenceNode, conversation: Conversation) -> Prompt | None:
        """Return the prompt as the template renders it; None if that drops thoughts from the sampled text."""
        messages = [
            {"role": "assistant", "content": conversation.messages[index]["content"]}
            if index in conversation.sampled_at
            else message
            for index, message in enumerate(chat.messages)
        ]
        text = chat.render(self._codec, messages)
        if base.ended and text in base.texts:
            return None  # as in `_try_to_continue`: an answer with an end token cannot be continued
        tail = base.tail_after(text)
        if tail is None:
            self._drift.record(base.texts[-1], text, "the chat as its template renders it")
            return None
        tokens = base.tokens + self._tail_tokens(base, tail)
        return Prompt(tokens, text, base, chat, text, conversation.sampled_at)

    def _begins_alike(self, chat: Chat, conversation: Conversation, before: str) -> bool:
        """Return True if the text before the last sample matches the prompt that it was sampled from.

        Templates write an answer's opening differently in a prompt and in the history (an empty block of thoughts,
        say). That opening is kept as it was prompted, so only the text before it has to agree.
        """
        if before == conversation.prompt_text:
            return True
        asked = conversation.with_placeholders(conversation.messages)[:-1]
        stem = self._codec.render(asked, tools=chat.tools, options=chat.options, add_generation_prompt=False)
        return before.startswith(stem) and conversation.prompt_text.startswith(stem)

    def _continue_text(self, text: str, known: Iterable[SequenceNode]) -> Prompt | None:
        fitting = [(node, tail) for node in known if (tail := self._tail_after(node, text)) is not None]
        if not fitting:
            return None
        base, tail = max(fitting, key=lambda found: len(found[0].tokens))
        return Prompt(base.tokens + self._tail_tokens(base, tail), text, base)

    def _tail_after(self, node: SequenceNode, text: str) -> str | None:
        """Return what a text adds to a sequence; None if it does not continue it.

        After an empty answer the sequence's text is its prompt alone, with which other prompts begin as well.
        """
        tail = node.tail_after(text)
        if tail is None or not node.ended or node.metadata["content"]:
            return tail
        return tail if tail.startswith(self._codec.text_of(node.tokens[-1])) else None

    def _tail_tokens(self, base: SequenceNode, tail: str) -> list[int]:
        """Return the tokens after a sequence; an end token that the sequence already has is not repeated."""
        tokens = self._codec.encode_part(tail)
        return tokens[1:] if base.ended and tokens[:1] == base.tokens[-1:] else tokens

    def _without_end(self, base: SequenceNode, tail: str) -> str:
        return tail.removeprefix(self._codec.text_of(base.tokens[-1])) if base.ended else tail

    def _has_thoughts(self, conversation: Conversation) -> bool:
        texts = [text_of(conversation.messages[index].get("content")) for index in conversation.sampled_at]
        return any(tag in text for tag in THINK_TAGS for text in texts)

    def _record_rewritten_message(self, chat: Chat, known: list[SequenceNode], *, start: int) -> None:
        """Note a drift if an assistant's message was sampled here but comes back as something else."""
        for index in range(start, len(chat.messages)):
            message = chat.messages[index]
            if message.get("role") != "assistant":
                continue
            earlier = [
                n.conversation for n in known if n.conversation and n.conversation.has_sampled_after(chat.keys, index)
            ]
            if earlier and all(c.keys[index].isdisjoint(chat.keys[index]) for c in earlier):
                sampled = text_of(earlier[-1].messages[index].get("content"))
                self._drift.record(sampled, text_of(message.get("content")), "the assistant's message")
                return


def _closeness(node: SequenceNode, chat: Chat) -> tuple[int, int]:
    """Return how much of a chat a sequence holds: the number of messages, then that of shared message identities."""
    conversation = node.conversation
    return (0, 0) if conversation is None else (len(conversation.keys), conversation.shared_identities(chat.keys))


def _message_count(node: SequenceNode) -> int:
    return len(node.conversation.keys) if node.conversation is not None else 0
