"""Fixtures: a manager whose server gives scripted answers, and an HTTP client that has a session's key."""

from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from environments.sdk.config import APIServerConfig, SessionSettings
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.openai_proxy import SessionProxy
from environments.sdk.testing import FakeInference, InProcess

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def make_manager(tokenizer):
    """A function that makes a manager over a fake server of the given texts; `manager.fake` is that server."""

    def make(*says, settings=None, **options):
        texts = iter(says)
        end = tokenizer.eos_token_id
        fake = FakeInference(lambda *_: [*tokenizer.encode(next(texts)), end], end=end, version=3)
        server = APIServerConfig(server_type="vllm", base_url="http://fake/v1", model_name="small")
        found = ServerManager(
            [server],
            load_tokenizer=lambda: tokenizer,
            transport=InProcess(fake),
            sessions=settings or SessionSettings(),
            **options,
        )
        found.fake = fake
        found.proxy = SessionProxy(found, replace(settings or SessionSettings(), url="http://sessions.localhost"))
        return found

    return make


@pytest.fixture
async def manager(make_manager):
    found = make_manager("1", "2", CALL, "3", "4")
    yield found
    await found.aclose()


@pytest.fixture
def inside():
    """Serve a session of a manager; yield it and an HTTP client with its key, without a socket between them."""

    @asynccontextmanager
    async def open_session(manager):
        session, transport = manager.open_session(), httpx.ASGITransport(manager.proxy, raise_app_exceptions=False)
        with manager.proxy.serve(session):
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(transport=transport, base_url=session.get_url(), headers=headers) as http:
                yield session, http

    return open_session


@pytest.fixture
def reach():
    """Return an HTTP client for a session, with its address as base and its key in the header."""
    return lambda session, **headers: httpx.AsyncClient(
        base_url=session.get_url(), headers={"Authorization": f"Bearer {session.api_key}", **headers}, timeout=30
    )
