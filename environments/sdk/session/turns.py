"""One call to a session: its request, and how its samples become sequences and answers.

`SampleReader` makes sequences and messages from samples. `DeltaWriter` streams an answer as its tokens arrive: text
that is certain, then tool calls, then the finish reason. Text is certain if no later token can change it: incomplete
characters, possible stop strings and possible tool calls are held back. The pieces together are the content of the
whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.sdk.inference.sampling import Sample, Sampling, Split
from environments.sdk.session.openai_types import AssistantMessage, TokenLogprob
from environments.sdk.session.prompt_tokens import Chat, Prompt
from environments.sdk.session.tokens_and_masks import SequenceNode, extend_sequence
from environments.sdk.tokenizer import Codec
from environments.sdk.tools import JsonParser, ParsedText, ToolParser, overlap


@dataclass(slots=True)
class Turn:
    """One call to the server, with the list (`slot`) to which its sequences are added.

    The slot is reserved when the call starts, so that the order of sequences never depends on which call ends first.
    """

    prompt: Prompt
    slot: list[SequenceNode]
    replaces: bool
    sampling: Sampling
    split: Split
    generation_params: dict[str, Any]
    parser: ToolParser | None = None
    call_expected: bool = False
    tool_choice: Any = None
    first_call_only: bool = False
    """True if the client sees only the first tool call of an answer."""
    logprobs: bool = False
    keep: bool = True
    """True if its sequences are kept in the session; False for an agent's separate evaluation calls."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    deltas: DeltaWriter | None = None


class SampleReader:
    """Reader of samples: it builds the extended sequence and the content that the client gets."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def read(self, turn: Turn, sample: Sample) -> SequenceNode:
        """Return the sequence with its texts: as sampled, and as a client sees it."""
        base = turn.prompt.base
        before = turn.generation_params if base is None else base.metadata["generation_params"]
        # The trainer computes a sequence at its last turn's temperature: masks of turns at another one make no ratio
        # exact, and the tokens of such turns would be clipped where without masks they are weighted.
        keeps_masks = before.get("temperature") == turn.generation_params.get("temperature")
        node = extend_sequence(base, turn.prompt.tokens, sample, keeps_masks=keeps_masks)
        node.ended = self._has_end_token(sample, turn.sampling)
        body = sample.tokens[:-1] if node.ended else sample.tokens
        special = not self._codec.special_ids.isdisjoint(body)
        sampled = content = self._codec.decode(body)
        if special and turn.parser is None:
            content = self._codec.visible(body)
        content = turn.sampling.cut_at_stop(content)
        text = turn.prompt.text
        # If a client sees no text of the answer, its text is the prompt, with which every answer to it begins.
        node.texts = (text + sampled,) if content in {"", sampled} else (text + sampled, text + content)
        node.full_text = text + sampled + (self._codec.text_of(sample.tokens[-1]) if node.ended else "")
        node.metadata["content"] = content
        node.metadata["generation_params"] = turn.generation_params
        if turn.labels:
            node.metadata["labels"] = turn.labels
        if turn.prompt.chat is not None:
            _answer_chat(turn, turn.prompt.chat, node, content)
            node.metadata["message"].reasoning_content = sample.reasoning
        return node

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[TokenLogprob]:
        return [TokenLogprob(self._codec.text_of(t), value) for t, value in zip(tokens, logprobs, strict=True)]

    def _has_end_token(self, sample: Sample, sampling: Sampling) -> bool:
        if sample.finish_reason != "stop" or not sample.tokens:
            return False
        last = sample.tokens[-1]
        return last in self._codec.special_ids or last in (sampling.more.get("stop_token_ids") or ())


def _answer_chat(turn: Turn, chat: Chat, node: SequenceNode, sampled_text: str) -> None:
    """Store the message that the client gets; a later request that repeats it is matched to this node."""
    message, reason = AssistantMessage(sampled_text), node.finish_reason
    if turn.parser is not None:
        parsed = _parse(turn.parser, sampled_text, call_expected=turn.call_expected)
        if parsed.calls:
            calls = parsed.calls[:1] if turn.first_call_only else parsed.calls
            message = AssistantMessage(parsed.content or None, tool_calls=calls)
            reason = "tool_calls" if reason == "stop" else reason
    node.metadata["message"] = message
    node.metadata["choice_finish_reason"] = reason
    prompt = turn.prompt  # not the turn, which holds the node: only the garbage collector would free such a cycle
    node.recall = lambda: chat.completed(message.content, message.tool_calls, sampled_text, prompt)


def _parse(parser: ToolParser, text: str, *, call_expected: bool) -> ParsedText:
    parsed = parser.parse(text)
    return JsonParser().parse(text) if call_expected and not parsed.calls else parsed


PIECE_TOKENS = 8
"""Number of tokens per piece of an answer that arrived whole, because its server does not stream."""


@dataclass(slots=True)
class Delta:
    """A piece of one choice: the last one has the `finish_reason`."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


OnDelta = Callable[[Delta], None]


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    received: int = 0
    decoded_from: int = 0
    decoded_to: int = 0
    text: str = ""
    sent: int = 0


class DeltaWriter:
    """Stream writer: it passes the pieces of one turn's answers to `on_delta`."""

    def __init__(self, codec: Codec, reader: SampleReader, on_delta: OnDelta) -> None:
        self._codec = codec
        self._reader = reader
        self._on_delta = on_delta
        self._choices: dict[int, _Choice] = {}

    def receive(self, turn: Turn, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens of one sample, and send what has become certain."""
        choice = self._choices.setdefault(index, _Choice())
        choice.received += len(tokens)
        choice.tokens += tokens if turn.parser else [t for t in tokens if t not in self._codec.special_ids]
        choice.text += self._decode(choice)
        certain = _certain_length(turn, choice.text)
        token_logprobs = self._reader.logprobs(tokens, logprobs) if turn.logprobs else []
        if certain > choice.sent or token_logprobs:
            self._send(Delta(index, choice.text[choice.sent : certain], token_logprobs), choice)

    def end(self, turn: Turn, index: int, sample: Sample, node: SequenceNode) -> None:
        """Send the rest of an answer that is now complete."""
        known = self._choices.setdefault(index, _Choice()).received
        for start in range(known, len(sample.tokens), PIECE_TOKENS):
            part = slice(start, start + PIECE_TOKENS)
            self.receive(turn, index, sample.tokens[part], sample.logprobs[part])
        choice = self._choices[index]
        message = node.metadata.get("message")
        content = (message.content or "") if message is not None else node.metadata["content"]
        calls = [call.model_dump() for call in message.tool_calls or ()] if message is not None else []
        if content[choice.sent :]:
            self._send(Delta(index, content[choice.sent :]), choice)
        for at, call in enumerate(calls):
            self._send(Delta(index, tool_calls=_call_pieces(at, call)), choice)
        reason = node.metadata.get("choice_finish_reason", node.finish_reason)
        self._send(Delta(index, finish_reason=reason), choice)

    def _send(self, delta: Delta, choice: _Choice) -> None:
        choice.sent += len(delta.text)
        self._on_delta(delta)

    def _decode(self, choice: _Choice) -> str:
        """Return the text of the new tokens; "" while their last character is incomplete.

        Tokens are decoded together with those of the piece before, since some decoders begin a text differently.
        """
        end = len(choice.tokens)
        while end > choice.decoded_to and choice.tokens[end - 1] in self._codec.special_ids:
            end -= 1  # it may be the end token, which no client sees
        before = self._codec.decode(choice.tokens[choice.decoded_from : choice.decoded_to])
        text = self._codec.decode(choice.tokens[choice.decoded_from : end])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        choice.decoded_from, choice.decoded_to = choice.decoded_to, end
        return text[len(before) :]


def _certain_length(turn: Turn, text: str) -> int:
    """Return how many characters of an unfinished text can be sent already."""
    end = len(text)
    if not turn.sampling.more.get("include_stop_str_in_output"):
        for stop in turn.sampling.stop:
            found = text.find(stop)
            end = min(end, found if found >= 0 else len(text) - overlap(text, stop))
    if turn.parser is None:
        return end
    return 0 if turn.call_expected else min(end, turn.parser.certain_length(text[:end]))


def _call_pieces(index: int, call: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a tool call as stream pieces: first the name, then the arguments."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    first = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
    return [first, {"index": index, "function": {"arguments": arguments}}]
