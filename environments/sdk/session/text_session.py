"""Sessions with a server that tells text alone: evaluations by any provider, and trials of an environment without vLLM.

The tokens are what the tokenizer makes of the text, which need not be what was sampled, and there are no logprobs. So
they are refused for training, unless `allow_estimated_tokens` is set; then their groups are marked and say no logprobs.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, cast

from environments.sdk.errors import TokensUnavailable
from environments.sdk.inference.generation import InferenceServer, Sample, Split
from environments.sdk.session.answers import AssistantMessage, read_openai_chat, read_openai_completion
from environments.sdk.session.nodes import ESTIMATED
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.turns import Turn


class TextServer(InferenceServer, Protocol):
    """What answers in OpenAI's form."""

    async def chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], split: Split) -> dict[str, Any]: ...

    async def complete(self, prompt: str, kwargs: dict[str, Any], split: Split) -> dict[str, Any]: ...


class TextSession(ManagedSession):
    """A managed session whose tokens are an estimate."""

    reads_text_alone = False

    def __init__(self, *arguments: Any, allow_estimated_tokens: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowed = allow_estimated_tokens

    async def _generate(self, turn: Turn) -> list[Sample]:
        self._do_without_logprobs(turn)  # before the provider is paid for an answer that is refused
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
        return [self._sample_of(written(choice.message), choice.finish_reason) for choice in answers]

    def _refuse_for_training(self) -> None:
        if not self._allowed:
            config = self._server.config
            raise TokensUnavailable(
                f"server_type {config.server_type} ({config.base_url}) returns no token ids and logprobs, which "
                "training needs; set --openai.server_type vllm and --openai.base_url to a server with /generate, "
                "or try the environment with --env.allow_estimated_tokens true"
            )

    def _sample_of(self, text: str, reason: str) -> Sample:
        tokens = self._codec.encode_part(text)
        end = self._codec.tokenizer.eos_token_id
        ended = reason != "length" and end is not None
        return Sample([*tokens, end] if ended else tokens, [], "stop" if ended else reason, [])


def written(message: AssistantMessage) -> str:
    """An answer as a model would have written it, tool calls in the form of Hermes."""
    calls = [
        json.dumps({"name": call.function.name, "arguments": _parsed(call.function.arguments)}, ensure_ascii=False)
        for call in message.tool_calls or []
    ]
    return (message.content or "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
