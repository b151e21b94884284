"""The outermost layer: it requires keys, sends routes through the admission gate, and ends streams that break off."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from example_trainer.serving import app as app_module
from example_trainer.serving import fence as fence_module
from example_trainer.serving import generate, problems
from example_trainer.serving.adapters import Adapters
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.app import until_drained
from example_trainer.serving.asgi import ServerASGI
from example_trainer.serving.auth import AllowedHosts
from example_trainer.serving.fence import Fence
from example_trainer.serving.generate import GenerateHandler
from example_trainer.serving.problems import Problem
from example_trainer.serving.responses import Replies
from example_trainer.serving.testing import StubEngine

from .publishing import begin

pytestmark = pytest.mark.anyio

ANY_SITE = AllowedHosts(host="127.0.0.1", names=["*"], origins=["*"], has_keys=False)


class Wire:
    """A request as uvicorn passes it on, and the messages of its answer."""

    def __init__(self, path, *, method="POST", key=None, body=b"{}", headers=()):
        headers = [*headers] if key is None else [*headers, (b"authorization", b"Bearer " + key)]
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
    """The application behind `ServerASGI`; it records the paths of its requests."""

    def __init__(self, gate):
        self.asked, self.inside, self._gate = [], [], gate

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        self.inside.append(self._gate.inside)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def gate():
    return AdmissionGate()


@pytest.fixture
def app(gate):
    return Application(gate)


async def ask(asgi, path, **fields):
    wire = Wire(path, **fields)
    await asgi(wire.scope, wire.receive, wire.send)
    return wire


async def test_with_keys_every_route_but_health_needs_one_and_the_bridge_token_is_one(app, gate):
    asgi = ServerASGI(app, app, gate, root_path="", keys=[b"sesam", b"bridge"], allowed_hosts=ANY_SITE)
    routes = ["/generate", "/v1/completions", "/v1/load_lora_adapter", "/bridge/info", "/lora/status", "/metrics"]
    for path in routes:
        for method in ("GET", "POST"):
            for key in (None, b"guess", b""):
                refused = await ask(asgi, path, method=method, key=key)
                assert refused.status == 401
                assert b"--api-key" in refused.body
    assert app.asked == []
    for path in ("/health", "/readyz", "/ping"):
        assert (await ask(asgi, path, method="GET")).status == 200
    for key in (b"sesam", b"bridge"):
        assert (await ask(asgi, "/v1/completions", key=key)).status == 200


async def test_without_keys_nothing_is_asked(app, gate):
    asgi = ServerASGI(app, app, gate, root_path="", keys=[], allowed_hosts=ANY_SITE)
    assert (await ask(asgi, "/bridge/info", method="GET")).status == 200


async def test_a_head_request_is_answered_as_a_get_without_a_body_and_nothing_is_sampled_for_it(app, gate):
    """A load balancer's checks by HEAD were answered with 405, as vLLM's routes do."""

    async def only_gets(scope, receive, send):
        await send({"type": "http.response.start", "status": 200 if scope["method"] == "GET" else 405, "headers": []})
        await send({"type": "http.response.body", "body": b"ready"})

    asgi = ServerASGI(only_gets, app, gate, root_path="", keys=[], allowed_hosts=ANY_SITE)
    wire = await ask(asgi, "/readyz", method="HEAD")
    assert (wire.status, wire.body) == (200, b"")
    assert (await ask(asgi, "/generate", method="HEAD")).status == 405


async def test_generating_routes_pass_the_admission_gate_and_vllms_loading_of_adapters_is_ours(app, gate):
    asgi = ServerASGI(app, app, gate, root_path="/behind", keys=[], allowed_hosts=ANY_SITE)
    for path in ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/bridge/pause"):
        await ask(asgi, f"/behind{path}")
    assert app.asked == [
        "/behind/v1/completions",
        "/behind/lora/load_lora_adapter",
        "/behind/lora/unload_lora_adapter",
        "/behind/bridge/pause",
    ]
    assert app.inside == [1, 0, 0, 0]
    gate.refuse(problems.paused())
    assert (await ask(asgi, "/behind/v1/completions")).status == 503


async def test_routes_of_no_use_here_are_not_answered(app, gate):
    """These routes answered 500, or ended other clients' requests, whose names can be guessed."""
    asgi = ServerASGI(app, app, gate, root_path="", keys=[], allowed_hosts=ANY_SITE)
    for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/inference/v1/abort_requests", "/abort_requests"):
        answer = await ask(asgi, path)
        assert answer.status == 404
        assert path.encode() in answer.body
    assert app.asked == []


async def test_another_sites_page_gets_no_answer_by_any_route_but_health(app, gate):
    allowed_hosts = AllowedHosts(host="127.0.0.1", names=[], origins=[], has_keys=False)
    asgi = ServerASGI(app, app, gate, root_path="", keys=[], allowed_hosts=allowed_hosts)
    foreign = [(b"host", b"127.0.0.1:9001"), (b"origin", b"http://evil.example")]
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/bridge/pause", "/ping/"):
        assert (await ask(asgi, path, headers=foreign)).status == 403
    rebound = [(b"host", b"evil.example:9001")]
    for path in ("/v1/models", "/metrics", "/bridge/info"):
        assert (await ask(asgi, path, method="GET", headers=rebound)).status == 403
    assert app.asked == []
    for path in ("/health", "/readyz", "/ping"):
        assert (await ask(asgi, path, method="GET", headers=rebound)).status == 200


async def test_a_websocket_of_another_sites_page_is_refused(app, gate):
    """Browsers open a websocket to another site without asking it first."""
    allowed_hosts = AllowedHosts(host="127.0.0.1", names=[], origins=[], has_keys=False)
    asgi = ServerASGI(app, app, gate, root_path="", keys=[], allowed_hosts=allowed_hosts)
    wire = Wire("/v1/realtime", headers=[(b"host", b"127.0.0.1:9001"), (b"origin", b"http://evil.example")])
    wire.scope["type"] = "websocket"
    del wire.scope["method"]
    await asgi(wire.scope, wire.receive, wire.send)
    assert wire.status == 403
    assert app.asked == []


class BreakingEngine:
    """An engine that returns one token and then fails."""

    serves_adapter = None
    is_traced = False

    def generate(self, *_):
        async def pieces():
            output = SimpleNamespace(
                index=0, token_ids=[7], logprobs=None, text="", finish_reason=None, weight_versions=None
            )
            output.cumulative_logprob = None
            yield SimpleNamespace(outputs=[output], prompt_logprobs=None)
            raise problems.engine_dead()

        return pieces()


async def test_a_stream_that_breaks_ends_with_the_reason(gate, monkeypatch):
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
    fence = Fence(engine, gate, header=None)
    handler = GenerateHandler(engine, fence, gate, adapters, Replies(boot_id="b", tokenizer=None), None)
    body = json.dumps({"prompt": [5], "stream": True, "logprobs": None, "detokenize": False}).encode()
    wire = await ask(handler, "/generate", body=body)
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    first, last = wire.body.decode().strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["token_ids"] == [7]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"].endswith("engine-dead")
    assert gate.inside == 0


class AbortingEngine(BreakingEngine):
    """An engine that ends a request before its end, as a server does that stops or falls asleep."""

    def __init__(self, gate):
        self._gate = gate

    def generate(self, *_):
        async def pieces():
            self._gate.refuse(problems.paused())
            yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort")])

        return pieces()


async def test_a_request_that_is_ended_by_a_sleep_is_not_told_that_the_server_stops(gate, monkeypatch):
    monkeypatch.setattr(generate, "engine_problems", contextlib.nullcontext)
    monkeypatch.setattr(generate, "sampling_params", lambda _: None)
    engine = AbortingEngine(gate)
    models = SimpleNamespace(lora_requests={})
    adapters = Adapters(engine, models, enabled=False, model_names=["m"], boot_id="b", keep=1)
    fence = Fence(engine, AdmissionGate(), header=None)
    handler = GenerateHandler(engine, fence, gate, adapters, Replies(boot_id="b", tokenizer=None), None)
    wire = await ask(handler, "/generate", body=b'{"prompt": [5]}')
    assert (wire.status, json.loads(wire.body)["title"]) == (503, "paused")


async def test_an_adapter_that_goes_while_its_request_waits_at_the_gate_leaves_no_request_inside(gate, monkeypatch):
    """If the gate counted one request too many, no later publish would find the server drained."""
    monkeypatch.setattr(generate, "sampling_params", lambda _: None)
    engine = BreakingEngine()
    models = SimpleNamespace(lora_requests={})
    adapters = Adapters(engine, models, enabled=False, model_names=["m"], boot_id="b", keep=1)
    looked = []

    def named(model):
        looked.append(model)
        if len(looked) > 1:
            raise Problem(404, "unknown-model", "it has been unloaded meanwhile")

    monkeypatch.setattr(adapters, "named", named)
    fence = Fence(engine, gate, header=None)
    handler = GenerateHandler(engine, fence, gate, adapters, Replies(boot_id="b", tokenizer=None), None)
    wire = await ask(handler, "/generate", body=b'{"prompt": [5], "model": "first"}')
    assert wire.status == 404
    assert looked == ["first", "first"]
    assert gate.inside == 0


async def computing(gate: AdmissionGate) -> tuple[StubEngine, Fence]:
    """Return an engine that computes one request, and its fence."""
    engine = StubEngine()
    await gate.enter()
    engine.now_running |= {"computed_tokens": [7]}
    return engine, Fence(engine, gate, header=None)


async def test_a_draining_server_waits_for_what_its_engine_computes_and_for_nothing_else(gate, monkeypatch):
    """It never left if a client read its answer no further."""
    monkeypatch.setattr(fence_module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(app_module, "BEGUN_ANSWERS_SECONDS", 0.1)
    engine, fence = await computing(gate)
    draining = asyncio.ensure_future(until_drained(gate, fence))
    await asyncio.sleep(0.1)
    assert not draining.done()
    engine.now_running |= {"computed_tokens": []}
    await asyncio.wait_for(draining, 1)


async def test_a_draining_server_that_is_paused_by_hand_does_not_wait_for_the_resume(gate, monkeypatch):
    """It waited for ever."""
    monkeypatch.setattr(fence_module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(app_module, "BEGUN_ANSWERS_SECONDS", 0.3)
    _engine, fence = await computing(gate)
    await fence.hold()
    draining = asyncio.ensure_future(until_drained(gate, fence))
    await asyncio.sleep(0.1)
    assert not draining.done(), "the pause may end"
    await asyncio.wait_for(draining, 2)


async def test_a_draining_server_does_not_wait_for_requests_that_are_paused_with_torn_weights(gate, monkeypatch):
    """No publish reaches it any more, so they never ended, and it never left."""
    monkeypatch.setattr(fence_module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(app_module, "_DRAINING_LOOK_SECONDS", 0.02)
    _engine, fence = await computing(gate)
    publish_id = await begin(fence)
    fence.overwrite(publish_id, 1)
    draining = asyncio.ensure_future(until_drained(gate, fence))
    await asyncio.sleep(0.1)
    assert not draining.done(), "the publish may end"
    await fence.abort(publish_id)
    assert fence.torn
    await asyncio.wait_for(draining, 1)
