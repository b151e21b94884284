"""The body of an adapter: its limit, and a client that ends its connection before the end of the body."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from example_trainer.serving.adapter_routes import read_limited
from example_trainer.serving.problems import Problem

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def upload(*messages, headers=()):
    left = list(messages)

    async def receive():
        return left.pop(0)

    return Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)


def part(content, *, more=True):
    return {"type": "http.request", "body": content, "more_body": more}


async def test_a_body_is_read_whole_and_no_longer_than_its_limit():
    assert await read_limited(upload(part(b"ab"), part(b"c", more=False)), 3) == b"abc"
    announced = upload(headers=[(b"content-length", b"4")])
    for request in (announced, upload(part(b"ab"), part(b"cd", more=False))):
        with pytest.raises(Problem) as caught:
            await read_limited(request, 3)
        assert caught.value.status == 413


async def test_a_body_that_breaks_off_is_the_clients_mistake():
    """The log had the traceback of an error of the server, at each trainer that was killed while it sent an adapter."""
    with pytest.raises(Problem, match="broke off after 2 bytes"):
        await read_limited(upload(part(b"ab"), {"type": "http.disconnect"}), 3)
