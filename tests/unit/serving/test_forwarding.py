"""Adapters that servers pass on: each reaches two others, and one that is not reached is left out of the answer."""

from __future__ import annotations

import httpx
import pytest

from example_trainer.serving.forwarding import AdapterForwarder

pytestmark = pytest.mark.anyio

TOKEN = "bridge-token"


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Servers:
    """Servers that pass adapters on among each other, as the route of the real one does."""

    def __init__(self):
        self.got, self.down, self.broken = {}, set(), set()

    async def answer(self, request):
        host = request.url.host
        if host in self.down:
            raise httpx.ConnectError("refused")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        if host in self.broken:
            return httpx.Response(200, json={"no": "digest"})
        assert host not in self.got, "sent twice"
        params = request.url.params
        self.got[host] = (params["name"], int(params["version"]), request.content)
        answer = {"digest": "d", "boot_id": host}
        if others := params.get_list("forward_to"):
            limit_seconds = float(params["forward_seconds"])
            answer["forwarded"] = await self.forwarder().forward(
                params["name"], int(params["version"]), request.content, others, limit_seconds=limit_seconds
            )
        return httpx.Response(200, json=answer)

    def forwarder(self):
        return AdapterForwarder(TOKEN, transport=httpx.MockTransport(self.answer))


@pytest.fixture
def servers():
    return Servers()


@pytest.mark.parametrize("count", [1, 2, 3, 30])
async def test_an_adapter_reaches_every_address_once(servers, count):
    urls = [f"http://s{number}:9001" for number in range(count)]
    reached = await servers.forwarder().forward("policy-v2", 2, b"adapter", urls, limit_seconds=10.0)
    assert reached == {url: {"digest": "d", "boot_id": f"s{number}"} for number, url in enumerate(urls)}
    assert set(servers.got.values()) == {("policy-v2", 2, b"adapter")}


@pytest.mark.parametrize("kind", ["down", "broken"])
async def test_who_is_not_reached_is_left_out_with_those_behind_it(servers, kind):
    getattr(servers, kind).add("s0")
    urls = [f"http://s{number}:9001" for number in range(7)]
    reached = await servers.forwarder().forward("policy-v2", 2, b"adapter", urls, limit_seconds=10.0)
    assert sorted(reached) == [f"http://s{number}:9001" for number in (1, 3, 5)]
