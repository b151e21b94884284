"""Agents that use a session by HTTP leave exact sequences in their rollout, while it lasts."""

import json
import socket

import anyio
import httpx
import pytest

from environments.arithmetic_server import ArithmeticEnv
from environments.sdk.config import SessionSettings
from environments.sdk.runtime.cli import read_command
from environments.sdk.session.served import SessionsNotServed
from environments.sdk.session.tokens_and_masks import NOT_TRAINED, record_samples

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many now?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def test_an_agent_with_openais_own_client_leaves_exact_sequences_in_the_rollouts_journal(manager, tokenizer):
    openai = pytest.importorskip("openai")
    with record_samples("train") as sample_log:
        async with (
            manager.managed_server(use_proxy=True) as session,
            openai.AsyncOpenAI(base_url=session.get_url(), api_key=session.api_key, max_retries=0) as client,
        ):
            first = await client.chat.completions.create(model="small", messages=CHAT)
            said = {"role": "assistant", "content": first.choices[0].message.content}
            second = await client.chat.completions.create(model="small", messages=[*CHAT, said, *CHAT])
            called = await client.chat.completions.create(model="small", messages=CHAT, tools=TOOLS)
            assert [model.id async for model in client.models.list()] == ["small"]
    long, _ = session.nodes
    assert tokenizer.decode([token for token in long.masked_tokens if token != NOT_TRAINED]) == "1<|end|>2<|end|>"
    assert called.choices[0].finish_reason == "tool_calls"
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}
    assert sample_log.versions == {3}
    assert {*session.nodes} < {*sample_log.nodes}
    assert len({first.id, second.id, called.id}) == 3


async def test_a_session_is_reached_while_it_is_open_and_by_its_own_address_alone(manager, reach):
    async with manager.managed_server(use_proxy=True) as session:
        async with manager.managed_server(use_proxy=True) as other, reach(other) as http:
            await http.post("chat/completions", json={"messages": CHAT})
            assert (session.nodes, len(other.nodes)) == ([], 1)
        url, client = session.get_url(), reach(session)
    async with client as http:
        assert (await http.post(f"{url}/chat/completions", json={"messages": CHAT})).status_code == 404
    with pytest.raises(RuntimeError, match="use_proxy"):
        session.get_url()


async def test_closing_the_manager_closes_the_port(manager):
    async with manager.managed_server(use_proxy=True) as session:
        url = session.get_url()
    await manager.aclose()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_a_client_that_offers_another_protocol_is_answered_as_any_other(manager, reach):
    """Java's clients offer HTTP/2 with each request, whose body was lost."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
    async with manager.managed_server(use_proxy=True) as session, reach(session, **offer) as http:
        for number in (1, 2):
            assert (await http.post("chat/completions", json={"messages": CHAT})).status_code == 200
            assert len(session.nodes) == number


async def test_requests_of_an_agent_are_cancelled_with_its_rollout(manager, reach):
    manager.fake.delay_seconds = 30
    with anyio.move_on_after(0.3) as scope:
        async with manager.managed_server(use_proxy=True) as session, reach(session) as http:
            await http.post("chat/completions", json={"messages": CHAT})
    assert scope.cancelled_caught
    await let_go(manager)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_gave_it_up_leaves_no_sequence(manager, reach, stream):
    """Clients with a timeout repeat the request, so no agent would have seen the first answer."""
    manager.fake.delay_seconds = 30
    async with manager.managed_server(use_proxy=True) as session, reach(session) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("chat/completions", json={"messages": CHAT, "stream": stream}, timeout=0.3)
        await let_go(manager)
        manager.fake.delay_seconds = 0
        await http.post("chat/completions", json={"messages": CHAT})
        assert len(session.nodes) == 1


async def let_go(manager):
    with anyio.fail_after(5):
        while manager.fake.in_flight:  # noqa: ASYNC110 - nothing tells when a server lets go of a request
            await anyio.sleep(0.01)


async def test_sessions_are_served_where_the_settings_say_under_the_name_that_agents_know(make_manager, unused_port):
    settings = SessionSettings(host="127.0.0.2", port=unused_port, url=f"http://agents.example:{unused_port}")
    manager = make_manager("1", settings=settings)
    async with manager.managed_server(use_proxy=True) as session:
        assert session.get_url().startswith(f"http://agents.example:{unused_port}/")
        reached = session.get_url().replace("agents.example", "127.0.0.2")
        headers = {"Authorization": f"Bearer {session.api_key}", "Host": f"agents.example:{unused_port}"}
        async with httpx.AsyncClient(headers=headers) as http:
            assert (await http.post(f"{reached}/chat/completions", json={"messages": CHAT})).status_code == 200
    await manager.aclose()


async def test_an_environments_flags_say_how_its_sessions_are_served(unused_port, tokenizer_folder):
    flags = {"host": "127.0.0.2", "port": unused_port, "url": "http://agents.example:7000", "temperature": 0.7}
    given = [part for name, value in flags.items() for part in (f"--env.session_{name}", str(value))]
    command = read_command(ArithmeticEnv, "serve", [*given, "--env.tokenizer_name", str(tokenizer_folder)])
    env = ArithmeticEnv(command.env, command.servers)
    async with env.server.managed_server(use_proxy=True) as session:
        assert session.get_url().startswith("http://agents.example:7000/")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.2:{unused_port}/health")).status_code == 200
    assert env.server._sessions == SessionSettings(**flags)
    await env.aclose()


async def test_a_port_that_is_taken_is_reported_with_the_flag_that_chooses_another(make_manager, unused_port):
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=unused_port)
    async with listener:
        manager = make_manager(settings=SessionSettings(port=unused_port))
        with pytest.raises(SessionsNotServed, match=rf"port {unused_port}.*--env\.session_port"):
            async with manager.managed_server(use_proxy=True):
                pass


def is_free(port):
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_a_rollout_that_is_cancelled_while_sessions_begin_to_be_served_does_not_keep_the_port(
    make_manager, unused_port
):
    manager = make_manager("1", settings=SessionSettings(port=unused_port))

    async def open_one():
        async with manager.managed_server(use_proxy=True):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as rollouts:
        rollouts.start_soon(open_one)
        while is_free(unused_port):
            await anyio.lowlevel.checkpoint()
        rollouts.cancel_scope.cancel()
    async with manager.managed_server(use_proxy=True) as session:
        assert session.get_url().startswith(f"http://127.0.0.1:{unused_port}/")
    await manager.aclose()


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
