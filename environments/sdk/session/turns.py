"""One call to a session: what it asks for, and how its samples become sequences and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from environments.sdk.inference.generation import Sample, Split
from environments.sdk.inference.sampling import Sampling
from environments.sdk.session.answers import AssistantMessage, TokenLogprob
from environments.sdk.session.codec import Codec
from environments.sdk.session.nodes import SequenceNode, grow
from environments.sdk.session.prompts import Chat, Prompt
from environments.sdk.tools import JsonParser, ParsedText, ToolParser

if TYPE_CHECKING:
    from environments.sdk.session.deltas import DeltaWriter


@dataclass(slots=True)
class Turn:
    """One call to the server and where its sequences go.

    The place is reserved when the call starts, so that the order of sequences never depends on who ends first.
    """

    prompt: Prompt
    place: list[SequenceNode]
    replaces: bool
    sampling: Sampling
    split: Split
    generation_params: dict[str, Any]
    parser: ToolParser | None = None
    call_expected: bool = False
    tool_choice: Any = None
    one_call: bool = False
    """Whether further calls in an answer are left out of what the client sees."""
    logprobs: bool = False
    keep: bool = True
    """Whether its sequences belong to the session's; they do not where an agent asks for something on the side."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    deltas: DeltaWriter | None = None


class SampleReader:
    """Makes of a sample the grown sequence, and what the client gets of it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def read(self, turn: Turn, sample: Sample) -> SequenceNode:
        """The sequence with its texts: what was sampled, and what a client sees of it."""
        node = grow(turn.prompt.base, turn.prompt.tokens, sample)
        node.ended = self._has_end_token(sample, turn.sampling)
        body = sample.tokens[:-1] if node.ended else sample.tokens
        special = not self._codec.special_ids.isdisjoint(body)
        sampled = content = self._codec.decode(body)
        if special and turn.parser is None:
            content = self._codec.visible(body)
        content = turn.sampling.cut_at_stop(content)
        text = turn.prompt.text
        node.texts = (text + sampled,) if content == sampled else (text + sampled, text + content)
        node.full_text = text + sampled + (self._codec.text_of(sample.tokens[-1]) if node.ended else "")
        node.metadata["content"] = content
        node.metadata["generation_params"] = turn.generation_params
        if turn.labels:
            node.metadata["labels"] = turn.labels
        if turn.prompt.chat is not None:
            _answer_chat(turn, turn.prompt.chat, node, content)
        return node

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[TokenLogprob]:
        """Each token as text with its logprob."""
        return [TokenLogprob(self._codec.text_of(t), value) for t, value in zip(tokens, logprobs, strict=True)]

    def _has_end_token(self, sample: Sample, sampling: Sampling) -> bool:
        if sample.finish_reason != "stop" or not sample.tokens:
            return False
        last = sample.tokens[-1]
        return last in self._codec.special_ids or last in (sampling.more.get("stop_token_ids") or ())


def _answer_chat(turn: Turn, chat: Chat, node: SequenceNode, said: str) -> None:
    """The message that the client gets, and by which it will be recognised when it comes back."""
    message, reason = AssistantMessage(said), node.finish_reason
    if turn.parser is not None:
        parsed = _parse(turn.parser, said, call_expected=turn.call_expected)
        if parsed.calls:
            calls = parsed.calls[:1] if turn.one_call else parsed.calls
            message = AssistantMessage(parsed.content or None, tool_calls=calls)
            reason = "tool_calls" if reason == "stop" else reason
    node.metadata["message"] = message
    node.metadata["choice_finish_reason"] = reason
    prompt = turn.prompt  # not the turn, which holds the node: only the garbage collector would free such a circle
    node.recall = lambda: chat.completed(message.content, message.tool_calls, said, prompt)


def _parse(parser: ToolParser, text: str, *, call_expected: bool) -> ParsedText:
    parsed = parser.parse(text)
    return JsonParser().parse(text) if call_expected and not parsed.calls else parsed
