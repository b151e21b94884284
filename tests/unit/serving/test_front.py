"""The outermost layer: who needs a key, which routes pass the door, what becomes of a stream that breaks."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from example_trainer.serving import generate, problems
from example_trainer.serving.adapters import Adapters
from example_trainer.serving.door import Door
from example_trainer.serving.fence import Fence
from example_trainer.serving.front import Front
from example_trainer.serving.generate import GenerateHandler
from example_trainer.serving.replies import Replies

pytestmark = pytest.mark.anyio


class Wire:
    """One request as uvicorn would hand it on, and what was sent back."""

    def __init__(self, path, *, method="POST", key=None, body=b"{}"):
        headers = [] if key is None else [(b"authorization", b"Bearer " + key)]
        self.scope = {"type": "http", "method": method, "path": path, "headers": headers}
        self.sent = []
        self._messages = [{"type": "http.request", "body": body}]

    async def receive(self):
        return self._messages.pop(0) if self._messages else await generate.asyncio.Event().wait()

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent[1:])


class Application:
    """What stands behind the front: it notes the paths it was asked for."""

    def __init__(self, door):
        self.asked, self.inside, self._door = [], [], door

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        self.inside.append(self._door.inside)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def door():
    return Door()


@pytest.fixture
def app(door):
    return Application(door)


async def ask(front, path, **fields):
    wire = Wire(path, **fields)
    await front(wire.scope, wire.receive, wire.send)
    return wire


async def test_with_keys_every_route_but_health_needs_one_and_the_bridge_token_is_one(app, door):
    front = Front(app, app, door, root_path="", keys=[b"sesam", b"bridge"])
    routes = ["/generate", "/v1/completions", "/v1/load_lora_adapter", "/bridge/info", "/lora/status", "/metrics"]
    for path in routes:
        for method in ("GET", "POST"):
            for key in (None, b"guess", b""):
                refused = await ask(front, path, method=method, key=key)
                assert refused.status == 401
                assert b"--api-key" in refused.body
    assert app.asked == []
    for path in ("/health", "/readyz", "/ping"):
        assert (await ask(front, path, method="GET")).status == 200
    for key in (b"sesam", b"bridge"):
        assert (await ask(front, "/v1/completions", key=key)).status == 200


async def test_without_keys_nothing_is_asked(app, door):
    front = Front(app, app, door, root_path="", keys=[])
    assert (await ask(front, "/bridge/info", method="GET")).status == 200


async def test_generating_routes_pass_the_door_and_vllms_loading_of_adapters_is_ours(app, door):
    front = Front(app, app, door, root_path="/behind", keys=[])
    for path in ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/bridge/pause"):
        await ask(front, f"/behind{path}")
    assert app.asked == [
        "/behind/v1/completions",
        "/behind/lora/load_lora_adapter",
        "/behind/lora/unload_lora_adapter",
        "/behind/bridge/pause",
    ]
    assert app.inside == [1, 0, 0, 0]
    door.refuse(problems.paused())
    assert (await ask(front, "/behind/v1/completions")).status == 503


class BreakingEngine:
    """An engine that gives one token and dies."""

    serves_adapter = None

    def generate(self, *_):
        async def pieces():
            output = SimpleNamespace(
                index=0, token_ids=[7], logprobs=None, text="", finish_reason=None, weight_versions=None
            )
            yield SimpleNamespace(outputs=[output], prompt_logprobs=None)
            raise problems.engine_dead()

        return pieces()


async def test_a_stream_that_breaks_ends_with_the_reason(door, monkeypatch):
    monkeypatch.setattr(generate, "engine_problems", contextlib.nullcontext)
    monkeypatch.setattr(generate, "sampling_params", lambda _: None)
    engine = BreakingEngine()
    adapters = Adapters(
        engine,
        SimpleNamespace(lora_requests={}),
        enabled=False,
        model_names=["m"],
        boot_id="b",
        keep=1,
    )
    fence = Fence(engine, door, header=None)
    handler = GenerateHandler(engine, fence, door, adapters, Replies(boot_id="b", tokenizer=None), None)
    body = json.dumps({"prompt": [5], "stream": True, "logprobs": None, "detokenize": False}).encode()
    wire = await ask(handler, "/generate", body=body)
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    first, last = wire.body.decode().strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["token_ids"] == [7]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"].endswith("engine-dead")
    assert door.inside == 0
