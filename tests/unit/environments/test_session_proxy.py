"""Sessions over HTTP for agents that speak OpenAI's API, and sessions with providers that give text alone."""

import json

import anyio
import httpx
import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import TokensUnavailable
from environments.sdk.groups import scored_group, to_wire
from environments.sdk.inference.manager import ServerManager
from environments.sdk.session.journal import Journal, keep_journal
from environments.sdk.session.nodes import ESTIMATED, NOT_TRAINED
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.testing_servers import FakeOpenAI

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many now?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def manager(tokenizer):
    says = iter(["1", "2", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "3", "4"])
    end = tokenizer.eos_token_id
    fake = FakeInference(lambda *_: [*tokenizer.encode(next(says)), end], end=end, version=3)
    server = APIServerConfig(server_type="vllm", base_url="http://fake/v1", model_name="small")
    found = ServerManager([server], load_tokenizer=lambda: tokenizer, transport=InProcess(fake))
    found.fake = fake
    yield found
    await found.aclose()


async def test_an_agent_with_openais_own_client_leaves_exact_sequences_in_the_rollouts_journal(manager, tokenizer):
    openai = pytest.importorskip("openai")
    with keep_journal("train") as journal:
        async with (
            manager.managed_server(use_proxy=True) as session,
            openai.AsyncOpenAI(base_url=session.get_url(), api_key="any", max_retries=0) as client,
        ):
            first = await client.chat.completions.create(model="small", messages=CHAT)
            said = {"role": "assistant", "content": first.choices[0].message.content}
            await client.chat.completions.create(model="small", messages=[*CHAT, said, *CHAT])
            called = await client.chat.completions.create(model="small", messages=CHAT, tools=TOOLS)
            assert [model.id async for model in client.models.list()] == ["small"]
    long, _ = session.nodes
    assert tokenizer.decode([token for token in long.masked_tokens if token != NOT_TRAINED]) == "1<|end|>2<|end|>"
    assert called.choices[0].finish_reason == "tool_calls"
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}
    assert journal.versions == {3}
    assert {*session.nodes} < {*journal.nodes}


async def test_a_stream_is_one_piece_with_the_whole_answer(manager):
    openai = pytest.importorskip("openai")
    async with (
        manager.managed_server(use_proxy=True) as session,
        openai.AsyncOpenAI(base_url=session.get_url(), api_key="any", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="small", messages=CHAT, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["1"]


async def test_what_cannot_be_trained_on_is_refused_in_openais_form(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        url = f"{session.get_url()}/chat/completions"
        greedy = await http.post(url, json={"messages": CHAT, "temperature": 0})
        assert greedy.status_code == 400
        assert "temperature 0" in greedy.json()["error"]["message"]
        for body in ({}, {"messages": "x"}):
            assert (await http.post(url, json=body)).status_code == 400
        assert (await http.post(url, content=b"{")).status_code == 400
        manager.fake.problem = (400, "no such model")
        assert "no such model" in (await http.post(url, json={"messages": CHAT})).json()["error"]["message"]
    assert session.nodes == []


async def test_a_session_is_reached_while_it_is_open_and_by_its_own_address_alone(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        url = session.get_url()
        async with manager.managed_server(use_proxy=True) as other:
            await http.post(f"{other.get_url()}/chat/completions", json={"messages": CHAT})
            assert (session.nodes, len(other.nodes)) == ([], 1)
        root = url.rsplit("/", 2)[0]
        assert (await http.get(f"{root}/unknown/nodes")).status_code == 404
    async with httpx.AsyncClient() as http:
        assert (await http.post(f"{url}/chat/completions", json={"messages": CHAT})).status_code == 404
    with pytest.raises(RuntimeError, match="use_proxy"):
        session.get_url()


async def test_sessions_can_be_opened_read_and_closed_from_outside(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        root = session.get_url().rsplit("/", 2)[0]
        opened = (await http.post(f"{root}/sessions/create", json={"tool_parser": "json"})).json()
        await http.post(f"{root}/{opened['uuid']}/v1/chat/completions", json={"messages": CHAT})
        (node,) = (await http.get(f"{root}/{opened['uuid']}/nodes")).json()["nodes"]
        assert len(node["tokens"]) == len(node["masked_tokens"]) == len(node["logprobs"])
        assert len((await http.get(f"{root}/sessions")).json()["sessions"]) == 2
        assert (await http.delete(f"{root}/{opened['uuid']}")).status_code == 200
        assert (await http.get(f"{root}/{opened['uuid']}/nodes")).status_code == 404


async def test_closing_the_manager_closes_the_port(manager):
    async with manager.managed_server(use_proxy=True) as session:
        url = session.get_url()
    await manager.aclose()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


def text_manager(tokenizer, **options):
    provider = FakeOpenAI(say=["five", "six"])
    server = APIServerConfig(server_type="openai", base_url="http://provider/v1", model_name="big")
    manager = ServerManager([server], load_tokenizer=lambda: tokenizer, transport=InProcess(provider), **options)
    return manager, provider


async def test_a_provider_of_text_can_be_evaluated_through_a_session(tokenizer):
    manager, provider = text_manager(tokenizer)
    with keep_journal("eval"):
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
        journal = Journal("train", nodes=list(session.nodes))
        del raw["policy_versions"]
        group = to_wire(raw, journal)
    assert group.generation_params[ESTIMATED] is True
    assert group.inference_logprobs is None
    trained = [token for token in group.masks[0] if token != NOT_TRAINED]
    assert tokenizer.decode(trained) == "five<|end|>"


async def test_requests_of_an_agent_are_cancelled_with_its_rollout(manager):
    manager.fake.delay_seconds = 30
    with anyio.move_on_after(0.3) as scope:
        async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
            await http.post(f"{session.get_url()}/chat/completions", json={"messages": CHAT})
    assert scope.cancelled_caught
    with anyio.fail_after(5):
        while manager.fake.in_flight:  # noqa: ASYNC110 - nothing tells when a server lets go of a request
            await anyio.sleep(0.01)
