"""`ManagedSession`: what `env.server.managed_server()` yields.

Each call adds sequences or, when its prompt continues one, extends it. A continued sequence keeps the very tokens that
were sampled: only the text that the next turn adds is encoded, and never with an end token that is already there.
A second call that goes on from the same place becomes a branch: a sequence of its own, with the same tokens before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from environments.sdk.inference.generation import InferenceServer, Sample, Split
from environments.sdk.inference.sampling import Sampling
from environments.sdk.inference.server import refuse_for_training
from environments.sdk.session.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    TextChoice,
    Usage,
)
from environments.sdk.session.codec import Codec
from environments.sdk.session.drift import DriftLog
from environments.sdk.session.journal import current_split, record
from environments.sdk.session.nodes import SequenceNode, grow
from environments.sdk.session.prompts import Chat, Prompt, Prompter
from environments.sdk.tools import JsonParser, ParsedText, ToolParser, expected_call, tool_parser

logger = logging.getLogger(__name__)


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


class ManagedSession:
    """A conversation, or several side by side, with one inference server."""

    def __init__(
        self,
        server: InferenceServer,
        tokenizer: Any,
        *,
        trainable: bool = True,
        allow_truncated_sampling: bool = False,
        preserve_think_blocks: bool = True,
        tool_parser: Any = None,
        tool_call_parser: Any = None,
        drift: DriftLog | None = None,
        **unused: Any,
    ) -> None:
        if unused:
            logger.debug("managed session: ignored %s", ", ".join(sorted(unused)))
        self.url: str | None = None
        self._server = server
        self._codec = tokenizer if isinstance(tokenizer, Codec) else Codec(tokenizer)
        self._trainable = trainable
        self._allow_truncated = allow_truncated_sampling
        self._parser_wanted = tool_call_parser or tool_parser or "hermes"
        self._parser: ToolParser | None = None
        self._prompter = Prompter(self._codec, drift or DriftLog(), preserve_think_blocks=preserve_think_blocks)
        self._places: list[list[SequenceNode]] = []
        self._superseded: list[SequenceNode] = []
        self._being_extended: set[SequenceNode] = set()

    async def chat_completion(self, *, messages: Sequence[Any], **kwargs: Any) -> ChatCompletion:
        """Answer a chat; keyword arguments as OpenAI's and vLLM's, and `split="eval"`."""
        tools, choice = kwargs.pop("tools", None), kwargs.pop("tool_choice", None) or "auto"
        options = kwargs.pop("chat_template_kwargs", None) or {}
        input_ids = kwargs.pop("input_ids", None)
        chat = Chat.read(messages, tools, options)
        split, sampling = self._read(kwargs)
        prompt = (
            self._prompter.for_chat(chat, self._known())
            if input_ids is None
            else self._prompter.for_tokens(input_ids, self._known())
        )
        prompt.chat = chat
        turn = self._begin(prompt, sampling, split)
        if tools and choice != "none":
            turn.parser, turn.call_expected = self._tool_parser(), expected_call(choice)
        nodes = await self._sample(turn)
        choices = [
            ChatChoice(index, node.metadata["message"], node.metadata["choice_finish_reason"])
            for index, node in enumerate(nodes)
        ]
        return ChatCompletion(choices, _usage(turn, nodes), model=self._server.config.model_name)

    async def completion(self, *, prompt: str = "", **kwargs: Any) -> Completion:
        """Go on with a text, or with the tokens given as `input_ids`."""
        input_ids = kwargs.pop("input_ids", None)
        split, sampling = self._read(kwargs)
        known = self._known()
        made = self._prompter.for_tokens(input_ids, known) if input_ids else self._prompter.for_text(prompt, known)
        turn = self._begin(made, sampling, split)
        nodes = await self._sample(turn)
        choices = [TextChoice(index, n.metadata["content"], n.finish_reason) for index, n in enumerate(nodes)]
        return Completion(choices, _usage(turn, nodes), model=self._server.config.model_name)

    async def get_logprobs(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Any] | None = None,
        input_ids: list[int] | None = None,
        top_k: int = 1,
        split: Split | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """What the model thinks of each token of a text; nothing is sampled and no sequence is kept."""
        if input_ids is None:
            input_ids = (
                self._codec.encode_part(Chat.read(messages, None, {}).render(self._codec, list(messages)))
                if messages is not None
                else self._codec.encode(prompt or "")
            )
        found = await self._server.prompt_logprobs(input_ids, top_k, split or current_split())
        return found.as_mapping()

    @property
    def nodes(self) -> list[SequenceNode]:
        """All sequences, in the order of the calls that began them."""
        return [node for place in self._places for node in place]

    def get_state(self) -> dict[str, list[SequenceNode]]:
        return {"nodes": self.nodes}

    async def fetch_state(self) -> dict[str, list[SequenceNode]]:
        """The same, by the name that sessions behind Atropos' proxy have."""
        return self.get_state()

    def get_url(self) -> str:
        """Where any client of OpenAI's API reaches this session, while it is open."""
        if self.url is None:
            raise RuntimeError("this session is not served; open it with managed_server(use_proxy=True)")
        return self.url

    def reset(self) -> None:
        """Forget all sequences."""
        self._places.clear()
        self._superseded.clear()

    def _read(self, kwargs: dict[str, Any]) -> tuple[Split, Sampling]:
        split: Split = kwargs.pop("split", None) or current_split()
        sampling = Sampling.from_kwargs(kwargs)
        if split == "train" and self._trainable:
            sampling.require_trainable(allow_truncated=self._allow_truncated)
        return split, sampling

    def _known(self) -> Iterator[SequenceNode]:
        """Sequences that may be continued, those first that no other call has gone on from."""
        nodes = self.nodes
        yield from (node for node in nodes if node not in self._being_extended)
        yield from (node for node in nodes if node in self._being_extended)
        yield from self._superseded

    def _begin(self, prompt: Prompt, sampling: Sampling, split: Split) -> Turn:
        base, params = prompt.base, sampling.generation_params()
        if base is not None and base not in self._being_extended:
            found = next((place for place in self._places if base in place), None)
            if found is not None:
                self._being_extended.add(base)
                return Turn(prompt, found, True, sampling, split, params)
        place: list[SequenceNode] = []
        self._places.append(place)
        return Turn(prompt, place, False, sampling, split, params)

    async def _sample(self, turn: Turn) -> list[SequenceNode]:
        base = turn.prompt.base
        try:
            samples = await self._generate(turn)
        finally:
            if turn.replaces and base is not None:
                self._being_extended.discard(base)
        if turn.split == "train" and any(s.tokens and not s.logprobs for s in samples):
            self._require_logprobs()
        nodes = [self._finish(turn, sample) for sample in samples]
        self._put(turn, nodes)
        record(nodes, turn.split if self._trainable else "eval")
        return nodes

    async def _generate(self, turn: Turn) -> list[Sample]:
        return await self._server.generate(turn.prompt.tokens, turn.sampling, turn.split)

    def _require_logprobs(self) -> None:
        """Samples without logprobs came for training."""
        if self._trainable:
            refuse_for_training(self._server.config)

    def _finish(self, turn: Turn, sample: Sample) -> SequenceNode:
        """The grown sequence with its texts: what was sampled, and what a client sees of it."""
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
        if turn.prompt.chat is not None:
            self._answer_chat(turn, turn.prompt.chat, node, content)
        return node

    def _answer_chat(self, turn: Turn, chat: Chat, node: SequenceNode, said: str) -> None:
        """The message that the client gets, and by which it will be recognised when it comes back."""
        message, reason = AssistantMessage(said), node.finish_reason
        if turn.parser is not None:
            parsed = self._parse(turn, said)
            if parsed.calls:
                message = AssistantMessage(parsed.content or None, tool_calls=parsed.calls)
                reason = "tool_calls" if reason == "stop" else reason
        node.metadata["message"] = message
        node.metadata["choice_finish_reason"] = reason
        prompt = turn.prompt  # not the turn, which holds the node: only the garbage collector would free such a circle
        node.recall = lambda: chat.completed(message.content, message.tool_calls, said, prompt)

    def _parse(self, turn: Turn, text: str) -> ParsedText:
        assert turn.parser is not None
        parsed = turn.parser.parse(text)
        return JsonParser().parse(text) if turn.call_expected and not parsed.calls else parsed

    def _tool_parser(self) -> ToolParser:
        if self._parser is None:
            self._parser = tool_parser(self._parser_wanted, self._codec.tokenizer)
        return self._parser

    def _has_end_token(self, sample: Sample, sampling: Sampling) -> bool:
        if sample.finish_reason != "stop" or not sample.tokens:
            return False
        last = sample.tokens[-1]
        return last in self._codec.special_ids or last in (sampling.more.get("stop_token_ids") or ())

    def _put(self, turn: Turn, nodes: list[SequenceNode]) -> None:
        """An extended sequence is replaced where it stood; further samples of the same prompt follow it."""
        place = turn.place
        start = next((i for i, node in enumerate(place) if node is turn.prompt.base), len(place))
        replaced = place[start : start + turn.replaces]
        self._superseded.extend(replaced)
        place[start : start + len(replaced)] = nodes


def _usage(turn: Turn, nodes: Sequence[SequenceNode]) -> Usage:
    prompt = len(turn.prompt.tokens)
    return Usage(prompt, sum(len(node.tokens) - prompt for node in nodes))
