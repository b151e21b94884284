"""Sessions with providers of text only: allowed in evaluation, refused or marked in training."""

import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import RequestRefused, TokensUnavailable
from environments.sdk.groups import group_items, scored_group, scored_item, to_wire
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.openai_types import openai_document
from environments.sdk.session.tokens_and_masks import ESTIMATED, NOT_TRAINED, SampleLog, record_samples
from environments.sdk.testing import InProcess
from environments.sdk.testing_servers import FakeOpenAI

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many now?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class CallingProvider(FakeOpenAI):
    """A provider whose model calls the tool."""

    def answer(self, path, request):
        found = FakeOpenAI.answer(self, path, request)
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        for choice in found["choices"]:
            choice["message"] |= {"content": None, "tool_calls": [call]}
        return found


class ThinkingProvider(FakeOpenAI):
    """A provider that returns its model's thoughts apart from the answer, under one of two names."""

    name = "reasoning_content"

    def answer(self, path, request):
        found = FakeOpenAI.answer(self, path, request)
        for choice in found["choices"]:
            choice["message"][self.name] = "two and three"
        return found


def text_manager(tokenizer, provider_class=FakeOpenAI, **options):
    provider = provider_class(replies=["five", "six"])
    server = APIServerConfig(server_type="openai", base_url="http://provider/v1", model_name="big")
    manager = ServerManager([server], load_tokenizer=lambda: tokenizer, transport=InProcess(provider), **options)
    return manager, provider


async def test_a_provider_of_text_can_be_evaluated_through_a_session(tokenizer):
    manager, provider = text_manager(tokenizer)
    with record_samples("eval"):
        async with manager.managed_server() as session:
            answer = await session.chat_completion(messages=CHAT, n=2, temperature=0.0, max_tokens=9)
            plain = await session.completion(prompt="2+3=", max_tokens=9)
    assert [choice.message.content for choice in answer.choices] == ["five", "six"]
    assert plain.choices[0].text == "five"
    assert provider.requests[0][1]["messages"] == CHAT
    assert len(session.nodes) == 3


async def test_a_provider_of_text_is_refused_for_training_before_it_is_asked(tokenizer):
    manager, provider = text_manager(tokenizer)
    async with manager.managed_server() as session:
        with pytest.raises(TokensUnavailable, match=r"--env\.allow_estimated_tokens"):
            await session.chat_completion(messages=CHAT)
    assert provider.requests == []


async def test_estimated_tokens_are_marked_and_never_claim_logprobs(tokenizer):
    manager, _ = text_manager(tokenizer, allow_estimated_tokens=True)
    async with manager.managed_server() as session:
        await session.chat_completion(messages=CHAT, n=2)
        raw = scored_group(session.nodes, [0.0, 1.0])
        sample_log = SampleLog("train", nodes=list(session.nodes))
        del raw["policy_versions"]
        group = to_wire(raw, sample_log)
        one_by_one = to_wire(group_items([scored_item(node, 1.0) for node in session.nodes]), sample_log)
    assert group.generation_params[ESTIMATED] is one_by_one.generation_params[ESTIMATED] is True
    assert group.inference_logprobs is one_by_one.inference_logprobs is None
    trained = [token for token in group.masks[0] if token != NOT_TRAINED]
    assert tokenizer.decode(trained) == "five<|end|>"


@pytest.mark.parametrize("first", [0, 1])
async def test_a_group_with_one_estimated_member_claims_no_logprobs(tokenizer, first):
    manager, _ = text_manager(tokenizer, allow_estimated_tokens=True)
    async with manager.managed_server() as session:
        await session.chat_completion(messages=CHAT, n=2)
    nodes = list(session.nodes)
    nodes[first].metadata["generation_params"] = {"temperature": 1.0}  # as if another server had returned tokens
    for raw in (scored_group(nodes, [0.0, 1.0]), group_items([scored_item(node, 1.0) for node in nodes])):
        assert to_wire(raw, SampleLog("train", nodes=nodes)).inference_logprobs is None


async def test_a_provider_is_given_parts_of_every_kind_and_the_choice_of_tools(tokenizer):
    manager, provider = text_manager(tokenizer)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    with record_samples("eval"):
        async with manager.managed_server() as session:
            await session.chat_completion(messages=chat, tools=TOOLS, tool_choice="required")
    (_, request), *_ = provider.requests
    assert request["messages"] == chat
    assert request["tool_choice"] == "required"
    assert "What is it?" in session.nodes[0].full_text


@pytest.mark.parametrize("parser", ["hermes", "json"])
async def test_the_tool_calls_of_a_provider_reach_the_client_whichever_parser_is_set(tokenizer, parser):
    manager, _ = text_manager(tokenizer, CallingProvider, tool_parser=parser)
    with record_samples("eval"):
        async with manager.managed_server() as session:
            answer = await session.chat_completion(messages=CHAT, tools=TOOLS)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("add", '{"a": 1}')]


async def test_logprobs_that_a_provider_cannot_give_are_refused_before_it_is_asked(tokenizer):
    manager, provider = text_manager(tokenizer, allow_estimated_tokens=True)
    async with manager.managed_server() as session:
        with pytest.raises(RequestRefused, match="logprobs"):
            await session.chat_completion(messages=CHAT, logprobs=True)
    assert (provider.requests, session.nodes) == ([], [])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thoughts_that_a_provider_returns_apart_are_kept_with_the_answer(tokenizer, name):
    """They were lost, though `--env.thinking_mode` asks for them."""
    provider_class = type("Provider", (ThinkingProvider,), {"name": name})
    manager, _ = text_manager(tokenizer, provider_class)
    with record_samples("eval"):
        alone = await manager.chat_completion(messages=CHAT)
        async with manager.managed_server() as session:
            in_session = await session.chat_completion(messages=CHAT)
    for answer, text in ((alone, "five"), (in_session, "six")):
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == (text, *["two and three"] * 2)
        assert openai_document(answer)["choices"][0]["message"]["reasoning_content"] == "two and three"
        assert message.model_dump() == {"role": "assistant", "content": text}, "a next request does not repeat them"
    assert "two and three" not in session.nodes[0].full_text


async def test_an_answer_without_thoughts_has_no_field_for_them(tokenizer):
    manager, _ = text_manager(tokenizer)
    answer = await manager.chat_completion(messages=CHAT, split="eval")
    assert answer.choices[0].message.reasoning is None
    assert "reasoning_content" not in openai_document(answer)["choices"][0]["message"]
