"""`ManagedSession`: what `env.server.managed_server()` yields.

Each call adds sequences or, when its prompt continues one, extends it. A continued sequence keeps the very tokens that
were sampled: only the text that the next turn adds is encoded, and never with an end token that is already there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.sdk.inference.generation import InferenceServer, Sample, Split
from environments.sdk.inference.sampling import Sampling
from environments.sdk.session.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    TextChoice,
    Usage,
)
from environments.sdk.session.journal import current_split, record
from environments.sdk.session.nodes import SequenceNode, grow

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    """One call to the server: its prompt in text and tokens, what it continues, and where its sequences go.

    The place is reserved when the call starts, so that the order of sequences never depends on who ends first.
    """

    text: str
    tokens: list[int]
    base: SequenceNode | None
    place: list[SequenceNode]
    sampling: Sampling


class ManagedSession:
    """A conversation, or several side by side, with one inference server."""

    def __init__(
        self,
        server: InferenceServer,
        tokenizer: Any,
        *,
        trainable: bool = True,
        allow_truncated_sampling: bool = False,
        **unused: Any,
    ) -> None:
        if unused:
            logger.debug("managed session: ignored %s", ", ".join(sorted(unused)))
        self._server = server
        self._tokenizer = tokenizer
        self._trainable = trainable
        self._allow_truncated = allow_truncated_sampling
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._places: list[list[SequenceNode]] = []
        self._being_extended: set[SequenceNode | None] = set()

    async def chat_completion(self, *, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatCompletion:
        """Answer a chat; keyword arguments as OpenAI's and vLLM's, and `split="eval"`."""
        continues_assistant = bool(messages) and messages[-1].get("role") == "assistant"
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=kwargs.pop("tools", None),
            tokenize=False,
            add_generation_prompt=not continues_assistant,
            **kwargs.pop("chat_template_kwargs", {}),
        )
        nodes, usage = await self._sample(str(text), kwargs, template=True)
        choices = [
            ChatChoice(index, AssistantMessage(node.metadata["content"]), node.finish_reason)
            for index, node in enumerate(nodes)
        ]
        return ChatCompletion(choices, usage, model=self._server.config.model_name)

    async def completion(self, *, prompt: str, **kwargs: Any) -> Completion:
        """Go on with a text."""
        nodes, usage = await self._sample(prompt, kwargs, template=False)
        choices = [TextChoice(index, n.metadata["content"], n.finish_reason) for index, n in enumerate(nodes)]
        return Completion(choices, usage, model=self._server.config.model_name)

    @property
    def nodes(self) -> list[SequenceNode]:
        """All sequences, in the order of the calls that began them."""
        return [node for place in self._places for node in place]

    def get_state(self) -> dict[str, list[SequenceNode]]:
        return {"nodes": self.nodes}

    def reset(self) -> None:
        self._places.clear()

    async def _sample(self, text: str, kwargs: dict[str, Any], *, template: bool) -> tuple[list[SequenceNode], Usage]:
        split: Split = kwargs.pop("split", None) or current_split()
        input_ids = kwargs.pop("input_ids", None)
        sampling = Sampling.from_kwargs(kwargs)
        if split == "train" and self._trainable:
            sampling.require_trainable(allow_truncated=self._allow_truncated)
        turn = self._begin(text, input_ids, sampling, template=template)
        try:
            samples = await self._server.generate(turn.tokens, sampling, split)
        finally:
            self._being_extended.discard(turn.base)
        nodes = [self._finish(turn, sample) for sample in samples]
        self._put(turn, nodes)
        record(nodes, split if self._trainable else "eval")
        return nodes, Usage(len(turn.tokens), sum(len(sample.tokens) for sample in samples))

    def _begin(self, text: str, input_ids: list[int] | None, sampling: Sampling, *, template: bool) -> _Turn:
        found = None if input_ids is not None else self._find_base(text)
        if found is None:
            self._warn_of_drift(text)
            place: list[SequenceNode] = []
            self._places.append(place)
            return _Turn(text, input_ids or self._encode(text, template=template), None, place, sampling)
        place, base, tail = found
        self._being_extended.add(base)
        return _Turn(text, base.tokens + self._encode(tail, template=True), base, place, sampling)

    def _find_base(self, text: str) -> tuple[list[SequenceNode], SequenceNode, str] | None:
        """The longest sequence that `text` continues and that no other call is extending."""
        candidates = [
            (place, node, tail)
            for place in self._places
            for node in place
            if node not in self._being_extended and (tail := node.tail_after(text)) is not None
        ]
        return max(candidates, key=lambda found: len(found[1].tokens), default=None)

    def _encode(self, text: str, *, template: bool) -> list[int]:
        """Templates write special tokens themselves; for plain text the tokenizer adds its own, but never twice."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=not template)
        bos = self._tokenizer.bos_token_id
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def _finish(self, turn: _Turn, sample: Sample) -> SequenceNode:
        """The grown sequence with its texts: what was sampled, and what a client sees of it."""
        node = grow(turn.base, turn.tokens, sample)
        ended = sample.finish_reason == "stop" and bool(sample.tokens) and sample.tokens[-1] in self._special_ids
        body = sample.tokens[:-1] if ended else sample.tokens
        sampled = content = str(self._tokenizer.decode(body, skip_special_tokens=False))
        if not self._special_ids.isdisjoint(body):
            content = str(self._tokenizer.decode(body, skip_special_tokens=True))
        content = _cut_at_stop(content, turn.sampling.stop)
        node.end_text = self._text_of_special(sample.tokens[-1]) if ended else ""
        node.texts = (turn.text + sampled,) if content == sampled else (turn.text + sampled, turn.text + content)
        node.full_text = turn.text + sampled + node.end_text
        node.metadata["content"] = content
        node.metadata["generation_params"] = turn.sampling.generation_params()
        return node

    def _text_of_special(self, token: int) -> str:
        if token == self._tokenizer.eos_token_id:
            return str(self._tokenizer.eos_token)
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _put(self, turn: _Turn, nodes: list[SequenceNode]) -> None:
        """An extended sequence is replaced where it stood; further samples of the same prompt follow it."""
        place = turn.place
        start = next((i for i, node in enumerate(place) if node is turn.base), len(place))
        place[start : start + (turn.base is not None)] = nodes

    def _warn_of_drift(self, text: str) -> None:
        """Say when a prompt almost continues a sequence: rewritten history cannot be trained as one sequence."""
        for node in self.nodes:
            prompt = node.texts[0][: len(node.texts[0]) - len(node.metadata["content"])]
            if text.startswith(prompt) and len(text) > len(node.full_text):
                logger.warning(
                    "a chat's next turn does not continue what was sampled (the template or the client changed the "
                    "assistant's text); it becomes a sequence of its own"
                )
                return


def _cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string: the tokens include it, the answer does not."""
    ends = [found for stop in stops if stop and (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
