"""Clients that agents use: OpenAI's own library, and litellm if it is installed (as in `make test-all`)."""

import json
import os

import pytest

openai = pytest.importorskip("openai")

# The clients' warnings are not ours, and litellm turns a warning that is an error into a failed connection.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]

USER = {"role": "user", "content": "How many now?"}
SEARCH = {"type": "function", "function": {"name": "search", "strict": True, "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>'
SAID = ("one", f"Let me see. {CALL}", "four")


class OpenAI:
    """A client of OpenAI's library."""

    def __init__(self, session):
        self.client = openai.AsyncOpenAI(base_url=session.get_url(), api_key=session.api_key, max_retries=0)
        self.errors = openai

    async def chat(self, **fields):
        return await self.client.chat.completions.create(model="small", **fields)

    async def streamed(self, **fields):
        """Return the answer as the library assembles it, and the number of its pieces of text."""
        async with self.client.chat.completions.stream(model="small", **fields) as stream:
            pieces = [event async for event in stream if event.type == "content.delta"]
            return await stream.get_final_completion(), len(pieces)

    async def aclose(self):
        await self.client.close()


class LiteLlm:
    """A client of litellm, which LangChain, smolagents, the Agents SDK and others may use."""

    def __init__(self, session):
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is fetched from the network
        self.errors = self.litellm = pytest.importorskip("litellm")
        self.own = {"model": "openai/small", "api_base": session.get_url(), "api_key": session.api_key}

    async def chat(self, **fields):
        return await self.litellm.acompletion(**self.own, **fields, num_retries=0, max_retries=0)

    async def streamed(self, **fields):
        stream = await self.litellm.acompletion(
            **self.own, **fields, stream=True, stream_options={"include_usage": True}, num_retries=0, max_retries=0
        )
        chunks = [chunk async for chunk in stream]
        pieces = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
        return self.litellm.stream_chunk_builder(chunks, messages=fields["messages"]), len(pieces)

    async def aclose(self):
        """Do nothing: litellm keeps its connections for the process."""


@pytest.fixture(params=[OpenAI, LiteLlm], ids=["openai", "litellm"])
async def agent(request, make_manager):
    """A client of a session whose model says `SAID` in turn; `agent.session` is that session."""
    if request.param is LiteLlm:
        pytest.importorskip("litellm")
    manager = make_manager(*SAID)
    async with manager.managed_server(use_proxy=True) as session:
        client = request.param(session)
        client.session = session
        yield client
        await client.aclose()
    await manager.aclose()


async def test_an_agent_with_tools_leaves_one_sequence(agent):
    chat = [USER]
    first = (await agent.chat(messages=chat)).choices[0].message
    chat += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    second = (await agent.chat(messages=chat, tools=[SEARCH], tool_choice="auto")).choices[0]
    assert (first.content, second.finish_reason) == ("one", "tool_calls")
    (call,) = second.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"q": 1})
    chat += [
        second.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    last = await agent.chat(messages=chat, tools=[SEARCH])
    assert last.choices[0].message.content == "four"
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert len(agent.session.nodes) == 1


async def test_a_stream_is_put_together_to_the_same_answers(agent):
    first, pieces = await agent.streamed(messages=[USER])
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("one", "stop")
    assert pieces > 1
    said = {"role": "assistant", "content": "one"}
    second, _ = await agent.streamed(messages=[USER, said, USER], tools=[SEARCH])
    (call,) = second.choices[0].message.tool_calls
    assert second.choices[0].message.content == "Let me see."
    assert second.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"q": 1})
    said_again = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call.model_dump(include={"id", "type", "function"})],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    third, _ = await agent.streamed(messages=[USER, said, USER, said_again, result], tools=[SEARCH])
    assert third.choices[0].message.content == "four"
    assert len(agent.session.nodes) == 1


async def test_logprobs_and_several_answers_are_read(agent):
    answer = await agent.chat(messages=[USER], logprobs=True, n=2)
    assert [choice.message.content for choice in answer.choices] == ["one", SAID[1]]
    for choice, node in zip(answer.choices, agent.session.nodes, strict=True):
        told = [entry.logprob for entry in choice.logprobs.content]
        assert told == [value for value in node.logprobs if value != 1.0]


async def test_what_is_refused_is_the_librarys_own_error_with_the_reason(agent):
    for fields in ({"n": 0}, {"tool_choice": "required", "tools": [SEARCH]}, {"temperature": 0}, {"top_p": 0.5}):
        with pytest.raises(agent.errors.BadRequestError) as refused:
            await agent.chat(messages=[USER], **fields)
        assert next(iter(fields)) in str(refused.value)
    with pytest.raises(agent.errors.BadRequestError, match="messages"):
        await agent.chat(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        )
    assert agent.session.nodes == []


async def test_a_greedy_request_passes_with_the_header_and_leaves_no_sequence(agent):
    answer = await agent.chat(messages=[USER], temperature=0, extra_headers={"X-Atropos-Split": "eval"})
    assert answer.choices[0].message.content == "one"
    assert agent.session.nodes == []


async def test_a_wrong_key_is_an_authentication_error(agent, make_manager):
    manager = make_manager("one")
    async with manager.managed_server(use_proxy=True) as other:
        stranger = type(agent)(other)
        if isinstance(stranger, OpenAI):
            stranger.client.api_key = "any"
        else:
            stranger.own["api_key"] = "any"
        with pytest.raises(agent.errors.AuthenticationError):
            await stranger.chat(messages=[USER])
        await stranger.aclose()
    await manager.aclose()
