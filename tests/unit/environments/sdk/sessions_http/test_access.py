"""Only a holder of its address and key can use a session: no other program, no page of another site."""

from itertools import combinations, product

import anyio
import httpx
import pytest

from environments.sdk.config import KEY_VARIABLE, SessionSettings
from environments.sdk.session import openai_routes
from environments.sdk.session.openai_proxy import SessionProxy
from environments.sdk.session.served import ServedSessions
from environments.sdk.testing import served

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "How many now?"}]}
OWNER = "the-owners-own-key"


@pytest.fixture
def owner(monkeypatch):
    """Return headers with the proxy's own key."""
    monkeypatch.setenv(KEY_VARIABLE, OWNER)
    return {"Authorization": f"Bearer {OWNER}"}


def root_of(session):
    return session.get_url().rsplit("/", 2)[0]


WRONG_KEYS = ({}, {"Authorization": "Basic any"}, {"Authorization": "Bearer any"}, {"X-Key": "x"})


async def test_a_request_without_the_sessions_key_is_refused_and_leaves_no_sequence(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        for key, (path, body) in product(WRONG_KEYS, (("chat/completions", CHAT), ("completions", {"prompt": "1"}))):
            answer = await http.post(f"{session.get_url()}/{path}", json=body, headers=key)
            assert answer.status_code == 401
            assert "Authorization: Bearer" in answer.json()["error"]["message"]
        for key in WRONG_KEYS:
            assert (await http.get(f"{session.get_url()}/models", headers=key)).status_code == 401
            assert (await http.get(session.get_url().removesuffix("/v1") + "/nodes", headers=key)).status_code == 401
            assert (await http.delete(session.get_url().removesuffix("/v1"), headers=key)).status_code == 401
    assert session.nodes == []
    assert manager.fake.requests == []


async def test_a_key_opens_its_own_session_alone(manager, reach):
    async with (
        manager.managed_server(use_proxy=True) as session,
        manager.managed_server(use_proxy=True) as other,
        reach(session) as http,
    ):
        assert (await http.post(f"{other.get_url()}/chat/completions", json=CHAT)).status_code == 401
        assert other.nodes == []


OWNERS_ROUTES = ("GET /sessions", "POST /sessions/create", "GET /servers", "POST /setup", "GET /v1/models")


async def test_a_sessions_key_tells_nothing_of_the_others(manager, inside):
    async with inside(manager) as (session, http):
        for method, path in map(str.split, OWNERS_ROUTES):
            answer = await http.request(method, f"{root_of(session)}{path}", json={})
            assert answer.status_code == 401, path
            assert session.get_url().rsplit("/", 2)[1] not in answer.text


async def test_an_agent_cannot_end_the_session_of_a_rollout(manager, inside):
    async with inside(manager) as (session, http):
        assert (await http.delete(session.get_url().removesuffix("/v1"))).status_code == 401
        assert (await http.post("chat/completions", json=CHAT)).status_code == 200


FOREIGN_PAGES = (
    {"Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://[malformed"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)


async def test_a_page_of_another_site_is_refused_even_with_the_key(manager, inside):
    async with inside(manager) as (session, http):
        for page in FOREIGN_PAGES:
            assert (await http.post("chat/completions", json=CHAT, headers=page)).status_code == 403, page
            assert (await http.get("models", headers=page)).status_code == 403, page
            assert (await http.get(f"{root_of(session)}/health", headers=page)).status_code == 403, page
    assert session.nodes == []


async def test_a_body_that_is_not_said_to_be_json_is_refused(manager, inside):
    """A web page may send such a request to any site without asking first (preflight)."""
    async with inside(manager) as (session, http):
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
            headers = {"Content-Type": kind} if kind else {}
            for path in ("chat/completions", f"{root_of(session)}/sessions/create"):
                assert (await http.post(path, content=body, headers=headers)).status_code == 415, kind
    assert session.nodes == []


async def test_this_machines_own_names_are_answered(manager, reach):
    async with manager.managed_server(use_proxy=True) as session, reach(session) as http:
        for name in ("localhost", "127.0.0.1", "[::1]", "agents.localhost"):
            host = f"{name}:{httpx.URL(session.get_url()).port}"
            assert (await http.get("models", headers={"Host": host})).status_code == 200, host


async def test_ids_and_keys_cannot_be_guessed(manager):
    """Known ids must not help to guess the next one, as those of a counter would, however long."""
    secrets = []
    for _ in range(3):
        async with manager.managed_server(use_proxy=True) as session:
            secrets += [session.get_url().rsplit("/", 2)[1], session.api_key]
    assert all(len(secret) >= 32 for secret in secrets)
    for one, other in combinations(secrets, 2):
        alike = sum(a == b for a, b in zip(one, other, strict=True))
        assert alike < 10, (one, other)  # each of its 32 letters, out of 64, is the same with a chance of 1 in 64


async def test_a_part_of_a_key_or_id_opens_nothing(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        url, key = session.get_url(), session.api_key
        for other in (key[:-1], key[:1], key + "x", key.swapcase()):
            answer = await http.post(f"{url}/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {other}"})
            assert answer.status_code == 401, other
        name = url.rsplit("/", 2)[1]
        for other in (name[:-1], name[:1], name + "x", name.swapcase()):
            answer = await http.post(
                url.replace(name, other) + "/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {key}"}
            )
            assert answer.status_code in {401, 404}, other
    assert session.nodes == []


async def test_an_agent_that_is_told_an_address_alone_finds_the_key_in_it(make_manager):
    """Environments written for Atropos pass only the address to their agents."""
    manager = make_manager("1", "2", settings=SessionSettings(key_in_url=True))
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        url = session.get_url()
        assert session.api_key in url
        assert (await http.post(f"{url}/chat/completions", json=CHAT)).status_code == 200
        bare = session.get_url(with_key=False)
        assert (await http.post(f"{bare}/chat/completions", json=CHAT)).status_code == 401
        wrong = url.replace(session.api_key, "x" * 32)
        assert (await http.post(f"{wrong}/chat/completions", json=CHAT)).status_code == 401
    await manager.aclose()


async def test_the_owner_opens_reads_lists_and_closes_sessions_from_outside(owner, make_manager):
    manager = make_manager("1", "2")
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        root = root_of(session)
        opened = (await http.post(f"{root}/sessions/create", json={"tool_parser": "json"}, headers=owner)).json()
        assert (opened["model_name"], opened["tool_parser"]) == ("small", "json")
        own = {"Authorization": f"Bearer {opened['api_key']}"}
        await http.post(f"{opened['url']}/chat/completions", json=CHAT, headers=own)
        (node,) = (await http.get(f"{root}/{opened['uuid']}/nodes", headers=own)).json()["nodes"]
        assert len(node["tokens"]) == len(node["masked_tokens"]) == len(node["logprobs"])
        listed = (await http.get(f"{root}/sessions", headers=owner)).json()["sessions"]
        assert {entry["uuid"]: entry["num_nodes"] for entry in listed}[opened["uuid"]] == 1
        assert len(listed) == 2
        assert opened["api_key"] not in str(listed)
        (server,) = (await http.get(f"{root}/servers", headers=owner)).json()["servers"]
        assert (server["base_url"], server["healthy"], server["model_name"]) == ("http://fake/v1", True, "small")
        assert (await http.delete(f"{root}/{opened['uuid']}", headers=own)).status_code == 200
        assert (await http.get(f"{root}/{opened['uuid']}/nodes", headers=own)).status_code == 404
        assert (await http.post(f"{root}/setup", json={}, headers=owner)).status_code == 409
    await manager.aclose()


async def test_what_a_session_cannot_be_opened_with_is_named(owner, make_manager):
    manager = make_manager()
    refused = {"track_tree": (True, 400), "colour": ("red", 400), "base_url": ("http://elsewhere/v1", 404)}
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient(headers=owner) as http:
        for name, (value, status) in refused.items():
            answer = await http.post(f"{root_of(session)}/sessions/create", json={name: value})
            assert answer.status_code == status
            assert {"base_url": "http://fake/v1"}.get(name, name) in answer.json()["error"]["message"]
    await manager.aclose()


async def test_a_session_opened_from_outside_ends_when_it_is_not_used(manager):
    sessions = ServedSessions(idle_seconds=1.0, most_opened_over_http=2)
    proxy = SessionProxy(manager, asks_for_keys=False, sessions=sessions)
    with served(proxy) as root:
        async with httpx.AsyncClient(base_url=root) as http:
            names = [(await http.post("/sessions/create", json={})).json()["uuid"] for _ in range(2)]
            assert (await http.post("/sessions/create", json={})).status_code == 429
            for _ in range(4):
                await anyio.sleep(0.35)
                assert (await http.get(f"/{names[0]}/nodes")).status_code == 200
            assert (await http.get(f"/{names[1]}/nodes")).status_code == 404
            assert (await http.get("/health")).json()["sessions"] == 1


async def test_a_session_that_is_answering_is_in_use_however_long_it_takes(manager):
    manager.fake.delay_seconds = 0.4
    proxy = SessionProxy(manager, asks_for_keys=False, sessions=ServedSessions(idle_seconds=0.1))
    with served(proxy) as root:
        async with httpx.AsyncClient(base_url=root) as http, anyio.create_task_group() as asking:
            name = (await http.post("/sessions/create", json={})).json()["uuid"]
            answers = []

            async def ask():
                answers.append(await http.post(f"/{name}/v1/chat/completions", json=CHAT))

            asking.start_soon(ask)
            await anyio.sleep(0.2)
            assert (await http.get("/health")).json()["sessions"] == 1
    assert [answer.status_code for answer in answers] == [200]


async def test_a_body_without_end_is_refused(manager, inside, monkeypatch):
    monkeypatch.setattr(openai_routes, "MOST_BODY_BYTES", 10_000)
    async with inside(manager) as (_session, http):
        body = b'{"messages": "' + b"x" * 10_000 + b'"}'
        answer = await http.post("chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413


async def test_health_names_the_model_and_no_session(manager):
    async with manager.managed_server(use_proxy=True) as session, httpx.AsyncClient() as http:
        found = (await http.get(f"{root_of(session)}/health")).json()
    assert found == {"status": "ok", "model": "small", "sessions": 1, "servers": 1, "healthy_servers": 1}
