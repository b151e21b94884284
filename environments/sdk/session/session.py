"""`env.server.managed_server()` yields a `ManagedSession`, or a `TextSession` if the server returns only text.

Each call adds sequences or, if its prompt continues one, extends it. A continued sequence keeps exactly the tokens that
were sampled: only the text that the next turn adds is encoded, and an end token that is already there is not repeated.
A second call that continues the same sequence becomes a branch: a sequence of its own with the same tokens before it.

`TextSession` serves evaluations by any provider, and trials of an environment without vLLM. Its tokens are the
tokenizer's encoding of the text, which may differ from what was sampled, and it has no logprobs. So its sequences are
refused for training, unless `allow_estimated_tokens` is set; then their groups are marked and carry no logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

from environments.sdk.config import SessionAddress
from environments.sdk.errors import RequestRefused, SamplingNotTrainable, TokensUnavailable
from environments.sdk.inference.sampling import InferenceServer, Sample, Sampling, Split
from environments.sdk.inference.server import refuse_for_training
from environments.sdk.session.openai_requests import SessionRequest
from environments.sdk.session.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    TextChoice,
    TokenLogprob,
    Usage,
    chat_logprobs,
    read_openai_chat,
    read_openai_completion,
    text_logprobs,
)
from environments.sdk.session.prompt_tokens import Chat, DriftLog, Prompt, PromptBuilder
from environments.sdk.session.tokens_and_masks import ESTIMATED, SequenceNode, current_split, log_nodes
from environments.sdk.session.turns import DeltaWriter, OnDelta, SampleReader, Turn
from environments.sdk.tokenizer import Codec
from environments.sdk.tools import NO_JSON, HermesParser, ToolParser, expected_call, tool_parser


class ManagedSession:
    """A session with one inference server: it holds one or several conversations."""

    text_only: ClassVar[bool] = True
    """True if messages must be text: the prompts are the tokens of the rendered chat template."""

    def __init__(
        self,
        server: InferenceServer,
        tokenizer: Any = None,
        *,
        track_tree: bool = False,
        trainable: bool = True,
        allow_truncated_sampling: bool = False,
        sampling_mask_limit: int = 0,
        preserve_think_blocks: bool = True,
        tool_parser: Any = None,
        tool_call_parser: Any = None,
        drift: DriftLog | None = None,
    ) -> None:
        if track_tree:
            raise ValueError("track_tree is not supported: a session keeps a list of sequences; leave it out")
        if tokenizer is None:
            tokenizer = getattr(server, "tokenizer", None)
        if tokenizer is None:
            raise ValueError("a session needs a tokenizer and its server has none; pass one")
        self.address: SessionAddress | None = None
        """The HTTP address, while the session is served."""
        self._server = server
        self._codec = tokenizer if isinstance(tokenizer, Codec) else Codec(tokenizer)
        self._reader = SampleReader(self._codec)
        self._trainable = trainable
        self._allow_truncated = allow_truncated_sampling
        self._mask_limit = sampling_mask_limit
        self._parser_wanted = tool_call_parser or tool_parser or "hermes"
        self._parser: ToolParser | None = None
        self._prompts = PromptBuilder(self._codec, drift or DriftLog(), preserve_think_blocks=preserve_think_blocks)
        self._slots: list[list[SequenceNode]] = []
        self._superseded: list[SequenceNode] = []
        self._being_extended: set[SequenceNode] = set()

    @property
    def tokenizer(self) -> Any:
        return self._codec.tokenizer

    async def chat_completion(
        self, *, messages: Sequence[Any], on_delta: OnDelta | None = None, **kwargs: Any
    ) -> ChatCompletion:
        """Answer a chat; the keyword arguments are those of OpenAI and vLLM, and `split="eval"`.

        `on_delta` is called with the answer piece by piece, as its tokens arrive.
        """
        tools, choice = kwargs.pop("tools", None), kwargs.pop("tool_choice", None) or "auto"
        input_ids, first_call_only = kwargs.pop("input_ids", None), kwargs.pop("parallel_tool_calls", None) is False
        chat = self._read_chat(messages, tools, kwargs.pop("chat_template_kwargs", None) or {})
        prompt = (
            self._prompts.for_chat(chat, self._continuable())
            if input_ids is None
            else self._prompts.for_tokens(input_ids, self._continuable())
        )
        prompt.chat = chat
        turn = self._begin(prompt, kwargs, on_delta)
        turn.tool_choice, turn.first_call_only = choice, first_call_only
        if tools and choice != "none":
            turn.parser, turn.call_expected = self._tool_parser(), expected_call(choice)
        nodes = await self._sample(turn)
        choices = [
            ChatChoice(index, node.metadata["message"], node.metadata["choice_finish_reason"], logprobs)
            for index, (node, logprobs) in enumerate(
                zip(nodes, self._logprobs(turn, nodes, chat_logprobs), strict=True)
            )
        ]
        return ChatCompletion(choices, _usage(turn, nodes), model=self.model_name)

    async def completion(self, *, prompt: str = "", on_delta: OnDelta | None = None, **kwargs: Any) -> Completion:
        """Continue a text, or the tokens given as `input_ids`."""
        input_ids, known = kwargs.pop("input_ids", None), self._continuable()
        built = self._prompts.for_tokens(input_ids, known) if input_ids else self._prompts.for_text(prompt, known)
        turn = self._begin(built, kwargs, on_delta)
        nodes = await self._sample(turn)
        choices = [
            TextChoice(index, node.metadata["content"], node.finish_reason, logprobs)
            for index, (node, logprobs) in enumerate(
                zip(nodes, self._logprobs(turn, nodes, text_logprobs), strict=True)
            )
        ]
        return Completion(choices, _usage(turn, nodes), model=self.model_name)

    def render(
        self, messages: Sequence[Any], *, tools: Any = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, list[int]]:
        """Return the prompt that a chat would become, and its tokens; nothing is sampled and no sequence is kept."""
        prompt = self._prompts.for_chat(self._read_chat(messages, tools, options or {}), self._continuable())
        return prompt.text, prompt.tokens

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
        """Return the model's logprobs of each token of a text; nothing is sampled and no sequence is kept."""
        if input_ids is None:
            input_ids = (
                self._codec.encode(prompt or "")
                if messages is None
                else self._codec.encode_part(self.render(messages)[0])
            )
        found = await self._server.prompt_logprobs(input_ids, top_k, split or current_split())
        return found.as_mapping()

    @property
    def model_name(self) -> str:
        return self._server.config.model_name

    @property
    def base_url(self) -> str:
        return self._server.config.base_url

    @property
    def tool_parser_name(self) -> str:
        wanted = self._parser_wanted
        return wanted if isinstance(wanted, str) else type(wanted).__name__

    @property
    def nodes(self) -> list[SequenceNode]:
        """All sequences, in the order of the calls that started them."""
        return [node for slot in self._slots for node in slot]

    def get_state(self) -> dict[str, list[SequenceNode]]:
        return {"nodes": self.nodes}

    async def fetch_state(self) -> dict[str, list[SequenceNode]]:
        """Return `get_state()`; sessions behind the original Atropos' proxy have it under this name."""
        return self.get_state()

    def arguments(self, asked: SessionRequest) -> dict[str, Any]:
        """Return the arguments of `chat_completion` or `completion` for a parsed request."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        for name in asked.template_variables:
            if name not in template:
                raise RequestRefused(f"{name}: the model's chat template does not use it; leave it out", param=name)
        options = {**asked.arguments.get("chat_template_kwargs", {}), **asked.template_variables}
        more = {"chat_template_kwargs": options} if options else {}
        return {**asked.arguments, **more, **({"labels": asked.labels} if asked.labels else {})}

    def get_url(self, *, with_key: bool | None = None) -> str:
        """Return the base URL of this session for any client of OpenAI's API, while it is open.

        Clients send `api_key`; `with_key` returns an address that contains the key, for clients that take only an
        address.
        """
        return self._require_address().url(with_key=with_key)

    @property
    def api_key(self) -> str:
        """The key that clients of `get_url()` have to send."""
        return self._require_address().key

    def _require_address(self) -> SessionAddress:
        if self.address is None:
            raise RuntimeError("this session is not served; open it with managed_server(use_proxy=True)")
        return self.address

    def reset(self) -> None:
        """Forget all sequences."""
        self._slots.clear()
        self._superseded.clear()

    def _read_chat(self, messages: Sequence[Any], tools: Any, options: Mapping[str, Any]) -> Chat:
        return Chat.read(messages, tools, options, other_parts=not self.text_only)

    def _continuable(self) -> Iterator[SequenceNode]:
        """Yield the sequences that may be continued, first those that no other call is extending."""
        nodes = self.nodes
        yield from (node for node in nodes if node not in self._being_extended)
        yield from (node for node in nodes if node in self._being_extended)
        yield from self._superseded

    def _begin(self, prompt: Prompt, kwargs: dict[str, Any], on_delta: OnDelta | None) -> Turn:
        split: Split = kwargs.pop("split", None) or current_split()
        keep, labels = kwargs.pop("keep", True), kwargs.pop("labels", None) or {}
        sampling = Sampling.from_kwargs(kwargs)
        before = prompt.base.metadata["generation_params"] if prompt.base is not None else {}
        if split == "train" and self._trainable:
            sampling.require_trainable(allow_truncated=self._allow_truncated, before=before)
            sampling = sampling.with_masks(self._mask_limit)
        slot, replaces = self._slot_of(prompt.base) if keep else ([], False)
        params = sampling.generation_params(before)
        turn = Turn(prompt, slot, replaces, sampling, split, params, keep=keep, labels=labels)
        logprobs = kwargs.get("logprobs")
        turn.logprobs = logprobs is not None and logprobs is not False  # 0 asks for the logprobs of the sampled tokens
        turn.deltas = DeltaWriter(self._codec, self._reader, on_delta) if on_delta is not None else None
        return turn

    def _slot_of(self, base: SequenceNode | None) -> tuple[list[SequenceNode], bool]:
        """Return the list for the new sequences, and whether they replace the one that they continue."""
        if base is not None and base not in self._being_extended:
            found = next((slot for slot in self._slots if base in slot), None)
            if found is not None:
                self._being_extended.add(base)
                return found, True
        slot: list[SequenceNode] = []
        self._slots.append(slot)
        return slot, False

    async def _sample(self, turn: Turn) -> list[SequenceNode]:
        base = turn.prompt.base
        try:
            samples = await self._generate(turn)
        finally:
            if turn.replaces and base is not None:
                self._being_extended.discard(base)
        if any(sample.tokens and not sample.logprobs for sample in samples):
            self._refuse_missing_logprobs(turn)
        if turn.sampling.mask_limit and any(sample.tokens and sample.sampling_masks is None for sample in samples):
            self._refuse_missing_masks(turn)
        nodes = [self._reader.read(turn, sample) for sample in samples]
        if turn.keep:
            self._store(turn, nodes)
        log_nodes(nodes, turn.split if self._trainable else "eval")
        if turn.deltas is not None:
            for index, (sample, node) in enumerate(zip(samples, nodes, strict=True)):
                turn.deltas.end(turn, index, sample, node)
        return nodes

    async def _generate(self, turn: Turn) -> list[Sample]:
        deltas = turn.deltas
        if deltas is None:
            return await self._server.generate(turn.prompt.tokens, turn.sampling, turn.split)

        def receive(index: int, tokens: list[int], logprobs: list[float]) -> None:
            deltas.receive(turn, index, tokens, logprobs)

        return await self._server.generate(turn.prompt.tokens, turn.sampling, turn.split, on_tokens=receive)

    def _refuse_missing_logprobs(self, turn: Turn) -> None:
        """Raise if training or the client needs logprobs, which this server does not return."""
        if turn.split == "train" and self._trainable:
            self._refuse_for_training()
        if turn.logprobs:
            config = self._server.config
            raise RequestRefused(
                f"logprobs: {config.base_url} (server_type {config.server_type}) returns none; leave the field out"
            )

    def _refuse_missing_masks(self, turn: Turn) -> None:
        config = self._server.config
        raise SamplingNotTrainable(
            f"--env.sampling_mask_limit {turn.sampling.mask_limit}: {config.base_url} (server_type "
            f"{config.server_type}) returns no sampling masks; leave it out, or sample from example_trainer's server"
        )

    def _refuse_for_training(self) -> None:
        refuse_for_training(self._server.config)

    def _logprobs(
        self, turn: Turn, nodes: Sequence[SequenceNode], form: Callable[[list[TokenLogprob]], dict[str, Any]]
    ) -> list[dict[str, Any] | None]:
        """Return the logprobs of each answer in the form of its route, if they were requested."""
        if not turn.logprobs:
            return [None] * len(nodes)
        start = len(turn.prompt.tokens)
        return [form(self._reader.logprobs(node.tokens[start:], node.logprobs[start:])) for node in nodes]

    def _tool_parser(self) -> ToolParser:
        if self._parser is None:
            self._parser = tool_parser(self._parser_wanted, self._codec.tokenizer)
        return self._parser

    def _store(self, turn: Turn, nodes: list[SequenceNode]) -> None:
        """Put new sequences where the extended one was; further samples of the same prompt follow it."""
        slot = turn.slot
        start = next((i for i, node in enumerate(slot) if node is turn.prompt.base), len(slot))
        replaced = slot[start : start + turn.replaces]
        self._superseded.extend(replaced)
        slot[start : start + len(replaced)] = nodes


def _usage(turn: Turn, nodes: Sequence[SequenceNode]) -> Usage:
    prompt = len(turn.prompt.tokens)
    return Usage(prompt, sum(len(node.tokens) - prompt for node in nodes))


class TextServer(InferenceServer, Protocol):
    """Interface of a text server: it answers in OpenAI's form."""

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]: ...

    async def complete(self, prompt: str, kwargs: dict[str, Any], split: Split) -> dict[str, Any]: ...


class TextSession(ManagedSession):
    """A managed session whose tokens are estimated: the server returns only text."""

    text_only = False

    def __init__(self, *arguments: Any, allow_estimated_tokens: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowed = allow_estimated_tokens

    async def _generate(self, turn: Turn) -> list[Sample]:
        self._refuse_missing_logprobs(turn)  # first, so that no provider is paid for an answer that is refused
        turn.generation_params[ESTIMATED] = True
        server = cast("TextServer", self._server)
        fields = {name: value for name, value in turn.sampling.payload().items() if value is not None}
        chat = turn.prompt.chat
        if chat is None:
            texts = read_openai_completion(await server.complete(turn.prompt.text, fields, turn.split)).choices
            return [self._sample_of(choice.text, choice.finish_reason) for choice in texts]
        if chat.tools:
            fields |= {"tools": chat.tools, "tool_choice": turn.tool_choice}
        answers = read_openai_chat(await server.chat(chat.as_given, fields, turn.split)).choices
        if turn.parser is not None and any(choice.message.tool_calls for choice in answers):
            turn.parser = HermesParser()  # the form of `written`, whichever form the provider's model has
        return [
            self._sample_of(written(choice.message), choice.finish_reason, choice.message.reasoning_content)
            for choice in answers
        ]

    def _refuse_for_training(self) -> None:
        if not self._allowed:
            config = self._server.config
            raise TokensUnavailable(
                f"server_type {config.server_type} ({config.base_url}) returns no token ids and logprobs, which "
                "training needs; set --openai.server_type vllm and --openai.base_url to a server with /generate, "
                "or try the environment with --env.allow_estimated_tokens true"
            )

    def _sample_of(self, text: str, reason: str, reasoning: str | None = None) -> Sample:
        tokens = self._codec.encode_part(text)
        end = self._codec.tokenizer.eos_token_id
        ended = reason != "length" and end is not None
        reason = "stop" if ended else reason
        return Sample([*tokens, end] if ended else tokens, [], reason, [], reasoning=reasoning)


def written(message: AssistantMessage) -> str:
    """Return an answer as the model would have written it, with tool calls in Hermes' form."""
    calls = [
        json.dumps({"name": call.function.name, "arguments": _parsed(call.function.arguments)}, ensure_ascii=False)
        for call in message.tool_calls or []
    ]
    return (message.content or "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except NO_JSON:
        return arguments
