"""An answer piece by piece, as its tokens arrive: text that is certain, then calls, then why it ended.

Text is certain once no later token can change what a client sees of it: letters that came in parts, stop strings and
tool calls that may have begun are held back. Together the pieces are the whole answer's content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.sdk.inference.generation import Sample
from environments.sdk.session.answers import TokenLogprob
from environments.sdk.session.codec import Codec
from environments.sdk.session.nodes import SequenceNode
from environments.sdk.session.turns import SampleReader, Turn
from environments.sdk.tools import overlap

PIECE_TOKENS = 8
"""How an answer is cut that came whole, because its server streams nothing."""


@dataclass(slots=True)
class Delta:
    """What is new of one choice; `finish_reason` is told with the last piece."""

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
    told: int = 0


class DeltaWriter:
    """Hands the pieces of one turn's answers to `on_delta`."""

    def __init__(self, codec: Codec, reader: SampleReader, on_delta: OnDelta) -> None:
        self._codec = codec
        self._reader = reader
        self._on_delta = on_delta
        self._choices: dict[int, _Choice] = {}

    def receive(self, turn: Turn, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take up tokens of one sample and tell what has become certain."""
        choice = self._choices.setdefault(index, _Choice())
        choice.received += len(tokens)
        choice.tokens += tokens if turn.parser else [t for t in tokens if t not in self._codec.special_ids]
        choice.text += self._decode(choice)
        certain = _certain_length(turn, choice.text)
        told = self._reader.logprobs(tokens, logprobs) if turn.logprobs else []
        if certain > choice.told or told:
            self._tell(Delta(index, choice.text[choice.told : certain], told), choice)

    def end(self, turn: Turn, index: int, sample: Sample, node: SequenceNode) -> None:
        """Tell the rest of an answer that is known whole by now."""
        known = self._choices.setdefault(index, _Choice()).received
        for start in range(known, len(sample.tokens), PIECE_TOKENS):
            part = slice(start, start + PIECE_TOKENS)
            self.receive(turn, index, sample.tokens[part], sample.logprobs[part])
        choice = self._choices[index]
        message = node.metadata.get("message")
        content = (message.content or "") if message is not None else node.metadata["content"]
        calls = [call.model_dump() for call in message.tool_calls or ()] if message is not None else []
        if content[choice.told :]:
            self._tell(Delta(index, content[choice.told :]), choice)
        for at, call in enumerate(calls):
            self._tell(Delta(index, tool_calls=_call_pieces(at, call)), choice)
        reason = node.metadata.get("choice_finish_reason", node.finish_reason)
        self._tell(Delta(index, finish_reason=reason), choice)

    def _tell(self, delta: Delta, choice: _Choice) -> None:
        choice.told += len(delta.text)
        self._on_delta(delta)

    def _decode(self, choice: _Choice) -> str:
        """The text of the new tokens; nothing while their last letter is incomplete.

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
    """How much of a text that goes on can be told already."""
    end = len(text)
    if not turn.sampling.more.get("include_stop_str_in_output"):
        for stop in turn.sampling.stop:
            found = text.find(stop)
            end = min(end, found if found >= 0 else len(text) - overlap(text, stop))
    if turn.parser is None:
        return end
    return 0 if turn.call_expected else min(end, turn.parser.certain_length(text[:end]))


def _call_pieces(index: int, call: dict[str, Any]) -> list[dict[str, Any]]:
    """A call as a stream tells it: who is called, then with what."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    first = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
    return [first, {"index": index, "function": {"arguments": arguments}}]
