"""A sleeping server serves nothing and takes no weights; it wakes up unchanged, also after a failed sleep."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from example_trainer.serving.adapter_routes import make_lora_router
from example_trainer.serving.bridge_routes import make_bridge_router, make_broadcast_router
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState

from .publishing import begin

pytestmark = pytest.mark.anyio


class SleepingEngine:
    """An engine with the two calls of vLLM's client that sleep needs."""

    def __init__(self):
        self.asked, self.fails = [], False

    async def sleep(self, level, *, mode):
        self.asked.append(("sleep", level, mode))
        if self.fails:
            raise RuntimeError("no memory on the host")

    async def wake_up(self):
        self.asked.append("wake_up")


@pytest.fixture
def state(fence, gate):
    config = ServerConfig(model="m", enable_sleep_mode=True)
    engine = SimpleNamespace(async_llm=SleepingEngine())
    return ServerState(
        config=config,
        boot_id="boot",
        bridge_token="t",
        hostname="h",
        vllm_version="0",
        engine=engine,
        fence=fence,
        gate=gate,
        adapters=SimpleNamespace(changing=asyncio.Lock()),
    )


async def test_a_sleeping_server_is_paused_and_refuses_new_weights_until_it_wakes(state, engine):
    await state.sleep(1)
    await state.sleep(1)
    assert (state.sleeping, engine.paused, state.fence.paused) == (True, True, True)
    with pytest.raises(Problem) as caught:
        state.check_awake()
    assert (caught.value.status, caught.value.kind) == (409, "asleep")
    await state.wake_up()
    await state.wake_up()
    state.check_awake()
    assert (state.sleeping, engine.paused, state.fence.paused) == (False, False, False)
    assert state.engine.async_llm.asked == [("sleep", 1, "abort"), "wake_up"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
@pytest.mark.parametrize(
    "path",
    [
        "/bridge/publish/begin",
        "/bridge/broadcast/join",
        "/bridge/broadcast/receive",
        "/bridge/broadcast/load",
        "/lora/upload?version=1",
        "/lora/load",
        "/lora/check",
        "/lora/load_lora_adapter",
        "/bridge/resume",
    ],
)
async def test_no_route_that_touches_weights_reaches_the_engine_of_a_sleeping_server(state, path):
    """Its memory is unmapped: an adapter that was sent then, a broadcast, or a resume, would have ended the engine."""
    await state.sleep(1)
    answer = await post(state, path, json=BODIES.get(path, {}))
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:atropos:problem:asleep")
    assert state.fence.paused


async def post(state, path, **fields):
    app = FastAPI()
    app.state.atropos = state
    for make in (make_bridge_router, make_broadcast_router, make_lora_router):
        app.include_router(make())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, headers={"Authorization": "Bearer t"}, **fields)


BODIES = {
    "/bridge/broadcast/join": {"address": "h", "port": 1, "rank": 1, "world_size": 2, "group_id": "g"},
    "/bridge/broadcast/receive": {"buckets": [], "transfer_id": "t"},
    "/bridge/broadcast/load": {"publish_id": "p", "version": 1, "transfer_id": "t"},
    "/lora/load": {"name": "n", "path": "p"},
    "/lora/check": {"name": "n"},
    "/lora/load_lora_adapter": {"lora_name": "n", "lora_path": "p"},
}


async def test_a_server_that_cannot_fall_asleep_goes_on_serving(state, engine):
    state.engine.async_llm.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        await state.sleep(1)
    assert (state.sleeping, engine.paused, state.fence.paused) == (False, False, False)


async def test_a_level_that_loses_the_weights_is_refused(state):
    with pytest.raises(Problem) as caught:
        await state.sleep(2)
    assert (caught.value.status, caught.value.kind) == (422, "bad-sleep-level")
    assert state.engine.async_llm.asked == []


async def test_under_a_publish_no_server_falls_asleep(state, fence):
    await begin(fence)
    with pytest.raises(Problem, match="a publish is under way"):
        await state.sleep(1)
    assert not state.sleeping


async def test_a_server_started_without_the_option_says_so(state):
    state.config = ServerConfig(model="m")
    with pytest.raises(Problem, match="started without --enable-sleep-mode"):
        await state.sleep(1)


async def test_no_server_falls_asleep_between_the_check_of_a_publish_and_its_begin(state, monkeypatch):
    """The publish ran beside the sleep, and waking resumed the engine in the middle of its write."""
    loop, check = asyncio.get_running_loop(), state.check_awake
    slept = []

    def checking():
        check()
        loop.call_soon_threadsafe(lambda: slept.append(asyncio.ensure_future(state.sleep(1))))
        time.sleep(0.1)

    monkeypatch.setattr(state, "check_awake", checking)
    answer = await post(state, "/bridge/publish/begin", json={"in_flight": "recompute"})
    assert answer.status_code == 200
    with pytest.raises(Problem, match="a publish is under way"):
        await slept[0]
    assert not state.sleeping


async def test_an_adapter_whose_body_arrives_while_the_server_falls_asleep_is_refused(state):
    async def body():
        yield b"the first part"
        await state.sleep(1)
        yield b"the rest"

    answer = await post(state, "/lora/upload?version=1", content=body())
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:atropos:problem:asleep")


async def test_a_server_falls_asleep_after_the_adapter_that_is_being_loaded(state):
    async with state.adapters.changing:
        sleeping = asyncio.ensure_future(state.sleep(1))
        await asyncio.sleep(0.05)
        assert state.engine.async_llm.asked == []
    await sleeping
    assert state.engine.async_llm.asked == [("sleep", 1, "abort")]


async def test_a_server_that_is_woken_while_it_falls_asleep_is_awake(state, engine):
    """It was awake for its routes, and then its engine fell asleep."""
    async with state.adapters.changing:
        sleeping = asyncio.ensure_future(state.sleep(1))
        waking = asyncio.ensure_future(state.wake_up())
        await asyncio.sleep(0.05)
    await asyncio.gather(sleeping, waking)
    assert state.engine.async_llm.asked == [("sleep", 1, "abort"), "wake_up"]
    assert (state.sleeping, engine.paused) == (False, False)


async def test_a_server_that_receives_a_broadcast_does_not_fall_asleep(state):
    """A broadcast is kept beside a copy of the weights, which were not in memory any more."""
    asked = []

    async def call_workers(method, *_):
        asked.append(method)
        with pytest.raises(Problem, match="a publish is under way"):
            await state.sleep(1)
        return [{"digest": "d"}]

    state.engine.call_workers, state.engine.parts = call_workers, lambda: None
    state.engine.derivations = lambda: {"quantization": None, "kv_cache_dtype": "auto", "is_mla": False}
    answer = await post(state, "/bridge/broadcast/receive", json=BODIES["/bridge/broadcast/receive"])
    assert answer.json() == {"digest": "d"}
    assert asked == ["atropos_receive_broadcast", "atropos_broadcast_progress"]
    await state.sleep(1)
